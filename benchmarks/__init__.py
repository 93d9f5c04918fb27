"""Scripts that measure marl-ray and its peers in one run, and store the tables."""
