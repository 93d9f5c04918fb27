"""Searching: search spaces, schedulers, and the plan that decides which trial runs next."""
