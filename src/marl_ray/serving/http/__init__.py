"""HTTP: reading requests and writing answers."""
