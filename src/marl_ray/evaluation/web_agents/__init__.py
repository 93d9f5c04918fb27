"""Benchmarks of episodes in a browser: the agents that play them, and what comes of it."""
