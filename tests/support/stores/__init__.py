"""Tests and fixtures of the experiment store, for any database."""
