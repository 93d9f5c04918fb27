"""Served experience as trajectories: logged acts and texts, and the collector that gathers batches of them."""
