"""Language agents: what they are told, how their calls are read, the tools they call. Runs without torch and Ray."""
