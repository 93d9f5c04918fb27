"""From texts to token ids and back: tokenizers, chat templates, tools, and where a turn ends."""
