"""KubeRay through its API: what is applied, what the operator makes of it, and how it stands."""
