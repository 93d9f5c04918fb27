"""vLLM in its own process: the messages to it, both sides that exchange them, and the transfer of weights."""
