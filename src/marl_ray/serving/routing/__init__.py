"""Routing: which arm a session gets, and which one answers if that arm fails."""
