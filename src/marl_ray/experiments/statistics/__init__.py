"""Statistics of outcomes: tests at every look, intervals, clusters of units and missing outcomes."""
