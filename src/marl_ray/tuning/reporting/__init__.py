"""Reporting on a sweep: comparisons, figures, the HTML report and MLflow."""
