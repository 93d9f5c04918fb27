"""Files that processes keep: complete or appended to on any storage, or a local database of texts that they share."""
