"""Runs and sweeps under a storage: lists, summaries, comparisons, names and deletion, without any pickle."""
