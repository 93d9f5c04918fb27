"""Scoring: runs the samples of a benchmark and reports the results, on this machine or on a Ray cluster."""
