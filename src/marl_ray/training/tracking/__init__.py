"""Metrics on their way to the driver, MLflow, other sinks, a progress bar and pictures."""
