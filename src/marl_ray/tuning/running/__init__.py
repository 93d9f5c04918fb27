"""Running a sweep: its driver, its trials on Ray Tune, seeds trained side by side, and the cluster's capacity."""
