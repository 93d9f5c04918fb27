"""Tests of the experiment store for any database: units, and what both halves use.

A module that imports them has a fixture `make_url`, a function that makes an empty database and returns its URL.
"""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment import Assignment
from marl_ray.experiments.states import Action
from marl_ray.experiments.statistics import Summary
from marl_ray.experiments.store import ExperimentStore, Exposure, Outcome, OutcomeConflictError, UnknownUnitError


def config(**weights: float) -> dict:
    return {"salt": "s", "arms": {arm: {"digest": f"digest-{arm}", "weight": w} for arm, w in weights.items()}}


def exposure(unit: str, arm: str, epoch: int = 1) -> Exposure:
    return Exposure("exp", unit, Assignment(arm, epoch, 0.5), 0.0)


@pytest.fixture
def url(make_url: Callable[[], str]) -> str:
    return make_url()


@pytest.fixture
def store(url: str) -> Iterator[ExperimentStore]:
    store = ExperimentStore(url)
    store.open_experiment("exp", config(a=1, b=1))
    yield store
    store.close()


def gradual(**weights: float) -> dict:
    return config(**weights) | {"strategy": "gradual", "stages": [0.1, 0.5, 1.0]}


def act(store: ExperimentStore, action: Action, name: str = "exp", **more: Any) -> Any:
    epoch = store.experiment(name).epoch
    return store.change(name, action, **({"epoch": epoch, "actor": "test", "reason": "because"} | more))


def test_first_exposure_stays_for_good(store):
    store.record_exposures([exposure("u", "a"), exposure("v", "b"), exposure("u", "b")])
    store.record_exposures([exposure("u", "b", epoch=2)])
    store.record_exposures([])
    assert store.assignment("exp", "u") == Assignment("a", 1, 0.5)
    assert store.assignment("exp", "w") is None
    assert {arm: part.exposures for arm, part in store.summary("exp").items()} == {"a": 1, "b": 1}


def test_outcomes_are_idempotent_and_final(store):
    store.record_exposures([exposure("u", "a")])
    assert store.record_outcome("exp", "u", 0.1).arm == "a"
    store.record_outcome("exp", "u", 0.1)
    with pytest.raises(OutcomeConflictError, match=r"already has outcome 0\.1, got 0\.2"):
        store.record_outcome("exp", "u", 0.2)
    with pytest.raises(UnknownUnitError, match="no exposure"):
        store.record_outcome("exp", "stranger", 1.0)
    assert store.summary("exp")["a"].outcomes.n == 1


def test_summary_has_the_moments_of_the_outcomes_even_far_from_zero(store):
    values = 1e9 + np.random.default_rng(0).normal(size=200)
    store.record_exposures([exposure(f"u{i}", "b") for i in range(300)] + [exposure("v", "a")])
    for i, value in enumerate(values):
        store.record_outcome("exp", f"u{i}", float(value))
    summary = store.summary("exp")
    assert (summary["b"].exposures, summary["b"].outcomes.n) == (300, 200)
    assert summary["b"].outcomes.mean == pytest.approx(values.mean(), rel=1e-12)
    assert summary["b"].outcomes.variance == pytest.approx(values.var(ddof=1), rel=1e-4)
    assert summary["a"].exposures == 1
    assert math.isnan(summary["a"].outcomes.mean)


def test_epoch_counts_changes_of_the_assignment(store):
    assert store.open_experiment("exp", config(a=1, b=1)).epoch == 1
    assert store.open_experiment("exp", config(a=1, b=1) | {"alpha": 0.01}).epoch == 1
    assert store.open_experiment("exp", config(a=1, b=3)).epoch == 2
    assert store.experiment("exp").config == config(a=1, b=3)
    assert store.experiment("none") is None


def test_an_arm_with_sessions_keeps_its_bundle(store):
    store.open_experiment("exp", config(a=1, c=1))  # nobody has met b
    store.record_exposures([exposure("u", "c")])
    with pytest.raises(
        MarlRayError, match="arm 'c' already has sessions with bundle digest-c, the config has no such arm"
    ):
        store.open_experiment("exp", config(a=1, b=1))
    changed = config(a=1, c=1)
    changed["arms"]["c"]["digest"] = "other"
    with pytest.raises(MarlRayError, match="another bundle"):
        store.open_experiment("exp", changed)
    assert store.experiment("exp").epoch == 2


def test_replicas_that_start_and_write_together_agree(url):
    errors, epochs = [], []

    def replica(k: int) -> None:
        try:
            mine = ExperimentStore(url)
            epochs.append(mine.open_experiment("exp", config(a=1, b=1)).epoch)
            for i in range(20):
                mine.record_exposures([exposure(f"u{j}", "ab"[k % 2]) for j in range(i, i + 10)])
            mine.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=replica, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert epochs == [1] * 6
    assert sum(part.exposures for part in ExperimentStore(url).summary("exp").values()) == 29


def test_outcomes_and_metrics_come_late_and_in_any_order(store):
    store.record_exposures([exposure(f"u{i}", "ab"[i % 2]) for i in range(7)])
    act(store, Action.STOP)
    for i in (5, 1, 3, 0):
        store.record_outcome("exp", f"u{i}", i / 10, at=100.0 - i)
    store.record_outcome("exp", "u2", 0.2, at=99.0)
    expected = [("u5", 95.0), ("u3", 97.0), ("u1", 99.0), ("u2", 99.0), ("u0", 100.0)]
    for page in (1, 2, 5, 100):
        assert [(row.unit, row.at) for row in store.outcomes("exp", page)] == expected
    assert next(store.outcomes("exp")) == Outcome("u5", "b", 1, 0.5, 0.0, 0.5, 95.0)
    assert list(store.outcomes("none")) == []


def test_metrics_are_idempotent_final_and_summed_up_by_name_and_arm(store):
    store.record_exposures([exposure(unit, arm) for unit, arm in ("ua", "va", "wb", "xb")])
    store.record_metrics("exp", "u", {"cost": 1.0, "latency_s": 0.5})
    store.record_metrics("exp", "u", {"cost": 1.0})
    store.record_metrics("exp", "v", {"cost": 4})
    assert store.record_metrics("exp", "w", {"cost": 2.0}).arm == "b"
    with pytest.raises(OutcomeConflictError, match=r"metrics\.cost: session 'u' already has 1\.0, got 2\.0"):
        store.record_metrics("exp", "u", {"another": 1.0, "cost": 2.0})
    with pytest.raises(UnknownUnitError):
        store.record_metrics("exp", "stranger", {"cost": 1.0})
    for wrong in ({"outcome": 1.0}, {"": 1.0}, {"x": math.nan}, {"x": math.inf}):
        with pytest.raises(MarlRayError, match="metrics"):
            store.record_metrics("exp", "u", wrong)
    assert store.metric_summaries("exp") == {
        "cost": {"a": Summary(2, 2.5, 4.5), "b": Summary(1, 2.0, 0.0)},
        "latency_s": {"a": Summary(1, 0.5, 0.0)},
    }
    assert store.summary("exp")["a"].outcomes.n == 0
