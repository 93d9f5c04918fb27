"""Experiments assign units to arms, store their outcomes, and test what these prove."""
