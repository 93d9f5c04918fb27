"""Named algorithms that learn from pairs of texts, of which people preferred one."""
