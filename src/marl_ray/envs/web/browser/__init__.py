"""A Chromium under control: what an agent sees and does there, with a deadline for everything."""
