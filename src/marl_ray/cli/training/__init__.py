"""The commands that train: runs, sweeps, jobs, and the demo."""
