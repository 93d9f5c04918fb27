"""Conformance: checks an algorithm against its formulas on tiny games whose expectations are enumerated."""
