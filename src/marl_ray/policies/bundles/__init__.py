"""Bundles: what is served. Folders with weights and `bundle.json`, known by their digest."""
