"""Sweeps: a sweep trains many runs that differ in some keys, stops bad ones early, and compares the rest over several
seeds."""
