"""vLLM in a process of its own: both ends of the conversation with it, and the way of weights into it."""
