"""Environments of other packages as compiled batches, equal to the packages step for step."""
