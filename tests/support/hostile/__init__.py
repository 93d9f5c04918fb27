"""Programs that attack the sandbox."""
