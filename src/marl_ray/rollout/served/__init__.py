"""Served experience as trajectories: readers of logged acts and texts, and the collector that gathers batches of them."""
