"""Ramps of arms: the evidence on an experiment, and the changes that it leads to."""
