"""Fixtures of the unit tests of serving."""

from toy_serving.fixtures import bundles, config

__all__ = ["bundles", "config"]
