"""Fixtures of the tests of the gateway's clients."""

from toy_serving.fixtures import bundles

__all__ = ["bundles"]
