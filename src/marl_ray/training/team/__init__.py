"""The policies that play and learn.

They are built from the config, and checked against the environment and the GPU.
"""
