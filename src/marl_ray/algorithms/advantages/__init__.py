"""Estimate how good each decision was: rewards become advantages, with and without a critic."""
