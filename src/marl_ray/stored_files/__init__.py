"""Files that processes keep, complete or appended to on any storage, or as a local database of texts."""
