"""Measurements of marl-ray and its peers: every script measures both in one run and stores a table."""
