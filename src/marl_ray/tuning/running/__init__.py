"""How a sweep runs: the driver, trials on Ray Tune, seeds side by side, capacity."""
