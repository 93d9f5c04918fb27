"""Served experience as trajectories.

Readers take logged acts and texts from files, and a collector gathers batches of them.
"""
