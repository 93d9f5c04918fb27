"""A shop, a forum and a wiki that this process serves, and synthetic tasks on them in the format of WebArena."""
