"""Configs of runs for the tests of configs, and the one line with which a wrong one is refused."""

from typing import Any

import pytest

from marl_ray.config import RunConfig, parse_config
from marl_ray.errors import MarlRayError

GOOD = {"name": "run", "env": {"id": "MultiGrid-Empty-5x5-v0"}}


def run(*overrides: str, **keys: Any) -> RunConfig:
    return parse_config(RunConfig, GOOD | keys, overrides)


def refusal(*overrides: str, **keys: Any) -> str:
    with pytest.raises(MarlRayError) as error:
        run(*overrides, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)


def language(*overrides: str) -> RunConfig:
    solver = {"model": {"preset": "tiny-0.2m"}}
    return run(*overrides, algorithm="reinforce_pp", env={"id": "math"}, team={"solver": solver})
