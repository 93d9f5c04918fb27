"""Conformance: checks the parts that users bring. A checker prints a line for every property."""
