"""Programs outside of the gateway: clients, deployment, the analysis of experiments, and the linter of Serve configs."""
