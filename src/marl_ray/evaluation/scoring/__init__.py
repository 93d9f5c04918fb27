"""Scoring runs the samples of a benchmark, here or on a Ray cluster, and reports the results."""
