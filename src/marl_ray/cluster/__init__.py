"""Ray clusters on this machine and on Kubernetes, the jobs that they run, and checks of manifests."""
