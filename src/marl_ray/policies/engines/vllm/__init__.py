"""The engine vLLM: the engine of a worker, the host in an actor, and the process that both start."""
