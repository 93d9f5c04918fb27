"""The statistics of experiments, on simulated outcomes: how often they err, and how soon they decide."""
