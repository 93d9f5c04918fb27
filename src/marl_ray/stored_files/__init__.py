"""Files that processes keep on any storage: complete or appended to, and each written by one process at a time."""
