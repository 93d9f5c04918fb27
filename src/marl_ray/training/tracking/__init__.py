"""The metrics of a run on their way to the driver, MLflow, other sinks, a progress bar and pictures."""
