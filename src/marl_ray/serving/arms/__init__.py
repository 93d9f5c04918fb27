"""Who computes an answer: bundles in this process, in deployments of their own, or behind a URL."""
