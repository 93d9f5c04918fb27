"""Which arm a session gets, and who answers where that arm fails."""
