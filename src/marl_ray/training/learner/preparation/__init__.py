"""The preparation of a batch before its gradient steps.

It computes everything that is constant across its epochs.
"""
