"""Programs of those who run a gateway: requests over HTTP, deployment, analysis of experiments, and a linter."""
