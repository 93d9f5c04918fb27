"""Small language models and tokenizers, made in code."""
