"""vLLM in a process of its own: what it is asked, how weights get there, and the process's end of both."""
