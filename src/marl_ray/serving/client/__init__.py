"""Programs outside of the gateway: its clients, deployment, and the linter of Serve configs."""
