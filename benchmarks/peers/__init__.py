"""Programs that marl-ray is compared with, most of which run in Python environments of their own."""
