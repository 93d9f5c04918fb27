"""Fixtures of the unit tests of serving."""

from stores.clocked_experiments import clock, stores
from toy_serving.fixtures import bundles, config

__all__ = ["bundles", "clock", "config", "stores"]
