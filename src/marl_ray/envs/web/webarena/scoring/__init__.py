"""Evaluators of web tasks: WebArena's with its own semantics, and WebArena-Verified's stricter ones."""
