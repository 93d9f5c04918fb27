"""Turn texts into token ids and back: tokenizers, chat templates, tools, and the ends of turns."""
