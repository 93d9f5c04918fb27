"""Environments with limited spending: a hard limit around any environment, and a small one with exact solutions."""
