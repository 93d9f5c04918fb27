"""One process at a time owns the folder of a run or a sweep: its lease, the files of the owners, and their creation."""
