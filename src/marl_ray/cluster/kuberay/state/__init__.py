"""The states of KubeRay's resources: pure functions of what a client sees of them."""
