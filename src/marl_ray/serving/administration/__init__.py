"""Programs of those who run a gateway: its deployment, its experiments over HTTP, their analysis, and a linter."""
