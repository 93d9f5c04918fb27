"""A small Kubernetes for tests, what runs on it, and the rendered Helm chart."""
