"""Bundles, from which policies are served: folders with weights and `bundle.json`, named by their digest."""
