"""vLLM in its own process: both sides, the messages, the transfer of weights, and shared use."""
