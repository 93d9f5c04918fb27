"""One file per group of paths: what the gateway does for each request."""
