"""Ray clusters: local ones, those of KubeRay, the jobs that any of them runs, and checks of KubeRay manifests."""
