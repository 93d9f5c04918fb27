"""Responses of language models: written by a session's arm, and answered at once or as a stream."""
