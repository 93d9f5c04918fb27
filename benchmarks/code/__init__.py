"""The judge of code: its speed and its verdicts."""
