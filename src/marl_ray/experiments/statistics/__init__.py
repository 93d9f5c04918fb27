"""Statistics of outcomes: sequential tests, exact bets, intervals, clusters of units and missing outcomes."""
