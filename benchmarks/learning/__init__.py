"""What the algorithms learn, and how fast they compute."""
