"""Shard a language model over workers: its weights, the layers that several compute together, and gathering."""
