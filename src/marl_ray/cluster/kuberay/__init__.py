"""KubeRay through its API: apply resources, watch what the operator makes of them, and say in one line how they stand."""
