"""The surroundings of a run: the capacity of its cluster, and signals that interrupt it."""
