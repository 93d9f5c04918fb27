"""Arms of language models: one that writes in this process, and one that writes in its own deployment."""
