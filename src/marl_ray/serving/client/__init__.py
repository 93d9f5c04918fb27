"""Programs outside of the gateway: its clients, deployment, the analysis of experiments, the linter of Serve configs."""
