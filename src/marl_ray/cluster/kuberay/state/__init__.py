"""How the resources of KubeRay stand: pure functions of what a client sees of them."""
