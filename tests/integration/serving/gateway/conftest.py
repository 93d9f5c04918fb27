"""Fixtures of the tests of whole gateways."""

from toy_serving.fixtures import bundles, config

__all__ = ["bundles", "config"]
