"""Paths of OpenAI's API, for its official clients and tools built on them."""
