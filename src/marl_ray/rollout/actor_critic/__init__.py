"""Actor-critics play: batches for training, and whole episodes for scores."""
