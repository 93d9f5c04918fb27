"""Decode responses in batches, token by token, and score complete ones.

The files have the cache, the drawing of tokens, stop strings, guides, biases, and the log-probabilities that are trained on.
"""
