"""Fixtures of the tests that start a gateway; a folder's conftest.py imports them."""

from pathlib import Path

import pytest

from marl_ray.config import GatewayConfig
from toy_serving.gateways import gateway_config, make_bundle


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two bundles whose policies all but certainly take actions 1 and 4."""
    folder = tmp_path_factory.mktemp("bundles")
    return {"one": make_bundle(folder, 1), "four": make_bundle(folder, 4)}


@pytest.fixture
def config(bundles: dict[str, str], tmp_path: Path) -> GatewayConfig:
    """A gateway with one A/B test of them."""
    return gateway_config(bundles, tmp_path / "experiments.db")
