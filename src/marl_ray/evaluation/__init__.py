"""Evaluation: benchmarks, off-policy estimates of bundles, and statistics over runs and episodes."""
