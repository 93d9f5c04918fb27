"""Where metrics go: to the driver, MLflow, other sinks, a progress bar and pictures."""
