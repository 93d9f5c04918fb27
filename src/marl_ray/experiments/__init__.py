"""Experiments: assign units to arms, store their outcomes, and test what the outcomes prove. No torch, no Ray."""
