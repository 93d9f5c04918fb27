"""The arms that a replica holds: which its experiments need, and how they are loaded and dropped."""
