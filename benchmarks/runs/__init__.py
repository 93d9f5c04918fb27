"""The cost of a run, a sweep and a command besides the learning."""
