"""The engine vLLM in a worker, in an actor and in serving, and the process that all of them start."""
