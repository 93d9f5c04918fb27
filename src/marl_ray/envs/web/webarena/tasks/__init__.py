"""Web tasks of the files of WebArena and of WebArena-Verified: read, checked, split and placed on sites."""
