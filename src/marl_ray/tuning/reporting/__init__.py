"""What came of a sweep: records, comparisons, figures, the report, MLflow."""
