"""Running a sweep: its driver, its trials on Ray Tune, their seeds, and the cluster's capacity."""
