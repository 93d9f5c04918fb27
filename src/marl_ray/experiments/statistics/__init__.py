"""Statistics of outcomes: sequential tests, exact bets, intervals, clusters and missing outcomes."""
