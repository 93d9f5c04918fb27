"""Text environments: agents read prompts and write answers."""
