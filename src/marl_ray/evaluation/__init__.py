"""Evaluation: benchmarks, off-policy estimates of bundles, and statistics of runs and episodes."""
