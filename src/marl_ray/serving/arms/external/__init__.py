"""Arms that are other parties' models, behind an OpenAI-compatible API."""
