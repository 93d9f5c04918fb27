"""Routing: which arm a session gets, and which arm answers if that one fails."""
