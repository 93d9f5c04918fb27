"""Logs that are written off the hot path: exposures, acts, metrics."""
