"""Arms of language models, which write in this process or in a deployment of their own."""
