"""vLLM in its own process: the messages to it, both sides, the transfer of weights, and how several decoders share one."""
