"""Runs and sweeps with known behaviour, and functions of their workers, which other processes import."""
