"""A run's folder, on any storage.

It holds the run's record, metrics, log and tracebacks, and the link to its best bundle.
"""
