"""What the outcomes prove of an experiment, and what is done about it."""
