"""Batched decoding, token by token: the cache, the drawing of tokens, stop strings, guides and biases."""
