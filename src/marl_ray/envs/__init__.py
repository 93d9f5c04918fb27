"""Environments: PettingZoo environments by id, copies of one as arrays, and the ones that the product brings."""
