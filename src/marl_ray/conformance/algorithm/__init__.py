"""Algorithms: their updates against their formulas, on tiny games whose expectations are enumerated."""
