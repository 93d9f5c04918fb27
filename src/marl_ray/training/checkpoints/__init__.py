"""Checkpoints, from which a run continues bit for bit.

They hold everything that this needs. They are written beside the training, and checked when they are read.
"""
