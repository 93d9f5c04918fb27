"""The config of one training run and its sections."""
