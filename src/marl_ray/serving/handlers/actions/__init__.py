"""Requests for the actions of a session's agents, or for its arm alone."""
