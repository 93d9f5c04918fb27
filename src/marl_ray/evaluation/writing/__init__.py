"""The samples of a benchmark: read from a file, or written by the language models of a bundle."""
