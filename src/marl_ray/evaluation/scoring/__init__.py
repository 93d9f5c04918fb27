"""Samples of a benchmark become results and a report, on this machine or on a Ray cluster."""
