"""One file per revision. A published revision is never edited; a change of the schema is a new file."""
