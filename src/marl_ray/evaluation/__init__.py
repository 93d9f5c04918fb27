"""Measured results: statistics over runs and episodes."""
