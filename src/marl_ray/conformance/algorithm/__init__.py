"""Checks of an algorithm's updates against its formulas, on tiny games whose every path is listed."""
