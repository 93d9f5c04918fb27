"""Arms that are somebody else's models, behind an OpenAI-compatible API."""
