"""Named algorithms that learn from pairs, of which one response is preferred."""
