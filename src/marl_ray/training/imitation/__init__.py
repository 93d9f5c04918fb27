"""Learning before the first iteration, by imitating demonstrations or logged decisions."""
