"""Engines that sample from a causal language model.

`policies/engines/sampler.py` makes the one that a config names.
"""
