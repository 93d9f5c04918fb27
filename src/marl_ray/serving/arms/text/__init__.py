"""Arms of language models: one that writes in this process, and one that writes in a deployment of its own."""
