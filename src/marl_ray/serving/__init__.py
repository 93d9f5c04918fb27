"""Serving: bundles behind an A/B gateway, on Ray Serve at the edge."""
