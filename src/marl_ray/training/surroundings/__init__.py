"""The surroundings of a run: the folder that it writes, the capacity of its cluster, and signals that interrupt it."""
