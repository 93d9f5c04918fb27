"""Engines that sample from a causal language model.

`policies/engines/choice.py` makes the one that a config names.
"""
