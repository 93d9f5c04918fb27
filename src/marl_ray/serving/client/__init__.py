"""Programs outside of the gateway: clients, deployment, analysis of experiments, and a linter."""
