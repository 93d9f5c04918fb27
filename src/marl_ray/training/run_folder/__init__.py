"""A run's folder, on any storage: the record of the run, its metrics, its log, and the link to its best bundle."""
