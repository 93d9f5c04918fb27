"""The gridworlds of the `multigrid` package, compiled, one copy or many at once."""
