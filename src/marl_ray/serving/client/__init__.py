"""Programs that talk to a gateway from outside: clients, deployment, and the linter of Serve configs."""
