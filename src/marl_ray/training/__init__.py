"""Training: the learner, checkpoints, the worker's loop, and the driver that runs it on Ray Train."""
