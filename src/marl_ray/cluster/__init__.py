"""Ray clusters: a local one of marl-ray's own, jobs submitted to any, and checks of KubeRay manifests."""
