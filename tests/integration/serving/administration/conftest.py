"""Fixtures of the tests of a gateway's administration."""

from toy_serving.fixtures import bundles

__all__ = ["bundles"]
