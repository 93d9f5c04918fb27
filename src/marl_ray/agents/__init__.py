"""Language agents: their prompts, the parsing of their calls, and the tools they call. Runs without torch and Ray."""
