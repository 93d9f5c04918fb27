"""The arms that a replica holds: which ones its experiments need, their bundles, and how they are loaded and dropped."""
