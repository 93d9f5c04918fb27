"""vLLM in a process of its own: the messages to it, both sides that exchange them, and the transfer of weights."""
