"""Evaluators of web tasks: those of WebArena with its own semantics, and the stricter ones of WebArena-Verified."""
