"""A run's folder, on any storage: its record, metrics, log and tracebacks, and the link to its best bundle."""
