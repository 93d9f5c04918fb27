"""Manifests of KubeRay's resources, rendered from one short config with good practice as the default."""
