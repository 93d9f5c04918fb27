"""Handlers of requests: one file per group of paths."""
