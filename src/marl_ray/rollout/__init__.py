"""Rollout: environments x policies -> Trajectories."""
