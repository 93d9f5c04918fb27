"""Sweeps: a sweep trains many runs that differ in some keys, stops bad ones early, and compares them over seeds."""
