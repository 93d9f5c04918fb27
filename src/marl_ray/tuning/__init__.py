"""Sweeps: many runs that differ in some keys, searched, stopped early, compared over seeds."""
