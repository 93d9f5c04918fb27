"""Handlers of requests: one file for each group of paths."""
