"""What is written off the hot path: exposures, acts, metrics."""
