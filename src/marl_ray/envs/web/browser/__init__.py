"""A Chromium under control: what an agent sees of its pages, what it does there, and a deadline for everything."""
