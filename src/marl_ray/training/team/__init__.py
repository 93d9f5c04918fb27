"""The policies that play and learn: built from the config, and checked against the environment and the GPU."""
