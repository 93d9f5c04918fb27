"""An experiment in a database whose clock a test moves: fixtures `clock` and `store`, and what fills and reads it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import AssignmentTable
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.ramp_decisions.ramp_control import LookResults, read_results
from marl_ray.serving.ramp_decisions.report import describe
from stores.migrated import migrate
from stores.units import read_record

WINDOW = 10.0
"""Seconds of a unit's window, by the clock that a test moves."""
ARMS = {"a": {"bundle": "bundle-a"}, "b": {"bundle": "bundle-b"}}
KEYS: dict[str, Any] = {
    "name": "exp",
    "arms": ARMS,
    "min_outcomes": 20,
    "min_duration_s": 0.0,
    "min_exposures": 10,
    "outcome_window_s": WINDOW,
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stores(tmp_path: Path, clock: Clock) -> Iterator[Stores]:
    stores = open_stores(migrate(f"sqlite:///{tmp_path}/experiments.db"), clock)
    yield stores
    stores.close()


def open_experiment(stores: Stores, **more: Any) -> ExperimentConfig:
    config = parse_config(ExperimentConfig, KEYS | more)
    stored = config.model_dump(mode="json") | {"salt": "s", "control": "a", "origin": "api"}
    for arm in config.arms:
        stored["arms"][arm]["digest"] = f"digest-{arm}"
    stores.experiments.open("exp", stored)
    return config


def sessions(stores: Stores, n: int, value: Any, prefix: str = "u", clusters: int = 0) -> list[Exposure]:
    """Units of the weights in force; `value(arm, k)` is the outcome, or None for no report."""
    state = stores.experiments.assignment_state("exp")
    table = AssignmentTable(state.weights, state.salt, state.epoch)
    names = [f"{prefix}{k}" for k in range(n)]
    clusters_of = [f"{prefix}-match{k % clusters}" if clusters else None for k in range(n)]
    rows = [Exposure("exp", name, table.assign(c or name), 0.0, c) for name, c in zip(names, clusters_of, strict=True)]
    stores.units.record_exposures(rows)
    reported = [(row.unit, value(row.assignment.arm, k)) for k, row in enumerate(rows)]
    stores.units.record(
        "exp", [Report(unit, {"outcome": float(value_of)}) for unit, value_of in reported if value_of is not None]
    )
    return rows


def look(stores: Stores, config: ExperimentConfig) -> LookResults:
    return read_results(stores.evidence, read_record(stores), config)


def describe_experiment(stores: Stores, config: ExperimentConfig) -> dict[str, Any]:
    return describe(read_record(stores), config, {}, look(stores, config), {})


def refusal(**more: Any) -> str:
    with pytest.raises(MarlRayError) as error:
        parse_config(ExperimentConfig, KEYS | more)
    assert "\n" not in str(error.value)
    return str(error.value)
