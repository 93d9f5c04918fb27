"""Checkpoints: everything needed to continue a run bit for bit, written beside the training and checked when it is read."""
