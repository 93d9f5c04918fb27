"""Paths of OpenAI's API, for its official clients and whatever is built on them."""
