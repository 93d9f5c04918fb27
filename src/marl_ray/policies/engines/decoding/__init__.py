"""Batched decoding token by token: the cache, drawing, stop strings, guides and biases."""
