"""Revisions of the schema: a published file is never edited, and a change of the schema is a new file."""
