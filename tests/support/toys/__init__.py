"""Stand-ins with known behaviour: environments, engines, algorithms, trackers, batches."""
