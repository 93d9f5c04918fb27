"""Experiments: which arm a unit gets, what its outcome was, and what the outcomes prove. No torch, no Ray."""
