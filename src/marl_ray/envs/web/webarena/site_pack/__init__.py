"""A shop, a forum and a wiki that this process serves, and made tasks on them in the format of WebArena."""
