"""Rollout: policies play environments, and the play becomes Trajectories."""
