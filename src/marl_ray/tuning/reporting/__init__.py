"""Reporting on a sweep: its records, comparisons, figures, the HTML report and MLflow."""
