"""Small environments, runs and sweeps with known behaviour."""
