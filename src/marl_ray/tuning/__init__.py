"""A sweep trains runs that differ in some keys, stops bad ones early, and compares the others over seeds."""
