"""Arms compute answers: bundles in this process, in deployments of their own, or models behind a URL."""
