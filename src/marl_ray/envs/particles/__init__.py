"""The particle worlds of mpe2 as compiled batches, equal to the package step for step."""
