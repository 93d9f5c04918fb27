"""Checks of KubeRay manifests before any cluster sees them."""
