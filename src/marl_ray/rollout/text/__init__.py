"""Language models play text environments, turn by turn."""
