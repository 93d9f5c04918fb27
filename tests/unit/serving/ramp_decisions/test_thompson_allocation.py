"""`strategy: thompson`: when weights change, to what, and that what is proven under them stays right."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stores.clocked_experiments import WINDOW, describe_experiment, look, open_experiment, refusal, sessions

from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import (
    Action,
    Allocation,
    ExperimentState,
    ExperimentStatus,
    RampPlan,
    StaleEpochError,
    state_under_config,
    state_under_weights,
    transition,
    weights_of,
)
from marl_ray.experiments.ramp_steps import RampStep
from marl_ray.experiments.statistics.bets import BettingTest, Claim
from marl_ray.serving.ramp_decisions.ramp_control import decide

THOMPSON: dict[str, Any] = {"strategy": "thompson", "reweigh_s": 1e-3, "floor": 0.1}
PLAN = RampPlan("a", {"a": 1.0, "b": 1.0, "c": 1.0}, "thompson")
RUNNING = ExperimentState(ExperimentStatus.RUNNING)


def test_weights_are_the_configs_until_there_are_others():
    assert weights_of(PLAN, RUNNING) == {"a": 1, "b": 1, "c": 1}
    weights = {"a": 0.2, "b": 0.5, "c": 0.3}
    state = state_under_weights(RUNNING, PLAN, weights, 7.0)
    assert (state.epoch, state.stage_epoch, state.allocation.at) == (2, 1, 7.0)
    assert weights_of(PLAN, state) == weights
    # The control inherits what a rolled-back arm had.
    barred = transition(state, Action.ROLLBACK, PLAN, 8.0, "b")
    assert weights_of(PLAN, barred) == {"a": 0.7, "b": 0.0, "c": 0.3}
    paused = transition(state, Action.PAUSE, PLAN, 8.0)
    assert weights_of(PLAN, paused) == {"a": 1, "b": 0, "c": 0}
    assert weights_of(PLAN, transition(paused, Action.RESUME, PLAN, 9.0)) == weights
    assert state_under_config(state, PLAN, PLAN, 9.0).allocation is None
    other = replace(PLAN, strategy="ab")
    for bad, plan, words in (
        ({"a": 1.0, "b": 1.0}, PLAN, "expected one for each of a, b, c"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, PLAN, "expected one for each"),
        (weights, other, "expected a running experiment of strategy thompson, this is running ab"),
    ):
        with pytest.raises(MarlRayError, match=words):
            state_under_weights(RUNNING, plan, bad, 1.0)
    with pytest.raises(MarlRayError, match=r"^weights: expected one for each of a, b, c, none for rolled-back arms$"):
        state_under_weights(barred, PLAN, weights, 1.0)
    with pytest.raises(
        MarlRayError, match=r"^weights: expected a running experiment of strategy thompson, this is paused thompson$"
    ):
        state_under_weights(paused, PLAN, weights, 1.0)


def test_traffic_follows_the_evidence_and_the_tests_stay_right(stores, clock):
    config = open_experiment(stores, **THOMPSON, bounds=[0, 1], min_exposures=10**9)
    rng, rows = np.random.default_rng(0), []
    for part in range(6):
        rows += sorted(
            sessions(stores, 80, lambda arm, k: rng.random() < (0.65 if arm == "b" else 0.5), f"p{part}-"),
            key=lambda row: row.unit,
        )
        epoch = stores.experiments.read("exp").epoch
        decide(stores.experiments, stores.evidence, config)
        assert stores.experiments.read("exp").epoch == epoch  # nothing more is judged yet
        clock.now += 2 * WINDOW
        assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD
    record = stores.experiments.read("exp")
    assert record.epoch >= 3 and record.weights["b"] > 0.7 and math.fsum(record.weights.values()) == pytest.approx(1)
    entry = stores.experiments.audit("exp")[-1]
    assert (entry.action, entry.actor) == ("reallocate", "gateway") and "chances to be best: a" in entry.reason
    assert entry.after["weights"] == record.weights
    # Bets are on the chances that were in force.
    shares = {
        e.epoch: e.after["weights"]["b"] / sum(e.after["weights"].values()) for e in stores.experiments.audit("exp")
    }
    assert len(set(shares.values())) == record.epoch
    outcomes = {row.unit: row.value for row in stores.units.outcomes("exp")}
    expected = BettingTest(Claim(1, 0.0, 1.0, 0.02))
    for row in rows:
        expected.add(
            np.array([outcomes[row.unit]]),
            np.array([row.assignment.arm == "b"]),
            np.array([shares[row.assignment.epoch]]),
        )
    bet = next(evidence for q, evidence in look(stores, config).look.bets.items() if q.claim.side == 1)
    assert bet.log_e == pytest.approx(expected.evidence().log_e, rel=1e-9)
    assert json.dumps(describe_experiment(stores, config), allow_nan=False)


def test_weights_wait_for_time_outcomes_reports_and_change(stores, clock):
    config = open_experiment(stores, **THOMPSON | {"reweigh_s": 3600.0})
    sessions(stores, 200, lambda arm, k: float(arm == "b") + k % 2)
    clock.now += 2 * WINDOW
    decide(stores.experiments, stores.evidence, config)
    assert stores.experiments.read("exp").state.allocation is None  # not an hour yet
    config = open_experiment(stores, **THOMPSON, min_outcomes=500)
    epoch = stores.experiments.read("exp").epoch
    decide(stores.experiments, stores.evidence, config)
    assert stores.experiments.read("exp").epoch == epoch
    config = open_experiment(stores, **THOMPSON)
    decide(stores.experiments, stores.evidence, config)
    weights = stores.experiments.read("exp").weights
    assert weights == {"a": pytest.approx(0.1, abs=1e-6), "b": pytest.approx(0.9, abs=1e-6)}
    epoch = stores.experiments.read("exp").epoch
    decide(stores.experiments, stores.evidence, config)
    assert stores.experiments.read("exp").epoch == epoch  # the same again
    with pytest.raises(StaleEpochError, match=r"^epoch: weights were decided on epoch 1, 'exp' is at 2$"):
        stores.experiments.reallocate("exp", weights, epoch=epoch - 1, actor="test", reason="")
    with pytest.raises(MarlRayError, match=r"^experiment: unknown experiment 'nobody'$"):
        stores.experiments.reallocate("nobody", weights, epoch=1, actor="test", reason="")
    assert stores.experiments.read("exp").state.allocation == Allocation(
        weights, pytest.approx(stores.experiments.read("exp").state.allocation.at)
    )


def test_an_arm_that_hides_its_outcomes_gets_no_traffic_for_it(stores, clock):
    """It reports only successes."""
    config = open_experiment(stores, **THOMPSON, bounds=[0, 1])
    sessions(stores, 600, lambda arm, k: 1.0 if arm == "b" and k % 10 == 0 else None if arm == "b" else k % 2)
    clock.now += 2 * WINDOW
    decide(stores.experiments, stores.evidence, config)
    assert stores.experiments.read("exp").state.allocation is None


def test_what_thompson_needs_is_checked():
    arms = {"a": {"bundle": "x"}, "b": {"bundle": "y", "weight": 0.0}}
    assert "strategy thompson needs weights above zero" in refusal(strategy="thompson", arms=arms)
    assert "floor: expected at most 1/2" in refusal(strategy="thompson", floor=0.6)
