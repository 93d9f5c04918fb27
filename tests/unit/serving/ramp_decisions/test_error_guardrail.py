"""The guardrail on errors that every experiment has."""

import numpy as np
import pytest
from toy_serving.fragile_arms import ask, bundle, config_of_arms
from toy_serving.gateways import serving

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.ramp_steps import RampStep
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.sequential import judge_harm
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.ramp_decisions.ramp_control import ERROR_GUARDRAIL, config_of, decide, read_results


async def test_every_experiment_has_a_guardrail_on_errors(tmp_path):
    arms = {"one": bundle(tmp_path, 1, False), "four": bundle(tmp_path, 4, False, broken=True)}

    async with serving(config_of_arms(tmp_path, arms)) as (client, app):
        for k in range(30):
            await ask(client, f"s{k}")
        app.service.unit_reports.write()
        record = app.service.stores.experiments.read("exp")
        (guardrail,) = read_results(app.service.stores.evidence, record, config_of(record)).guardrails
        (row,) = (await client.get("/v1/experiments/exp")).json()["guardrails"]
    assert (guardrail.name, guardrail.arm, guardrail.margin, guardrail.alpha) == ("error", "four", 0.01, 0.01)
    assert (row["name"], row["margin"]) == ("error", 0.01)


def summary_of(failed: int, total: int) -> Summary:
    share = failed / total
    return Summary(total, share, total * share * (1 - share) / (total - 1))


@pytest.mark.parametrize(
    ("treatment", "control", "low", "high"),
    [(0.1, 0.0, 0.99, 1.0), (1.0, 0.0, 1.0, 1.0), (0.1, 0.1, 0.0, 0.01), (0.02, 0.01, 0.0, 0.01), (0.0, 0.0, 0.0, 0.0)],
)
def test_the_guardrail_on_errors_finds_what_it_should_and_nothing_else(treatment, control, low, high):
    """The number of 400 experiments, each looked at 25 times, whose treatment is rolled back at these rates of failure."""
    rng, looks = np.random.default_rng(0), np.unique(np.geomspace(50, 3_000, 25).astype(int))
    rules = {
        "alpha": ERROR_GUARDRAIL.alpha,
        "margin": ERROR_GUARDRAIL.margin,
        "min_outcomes": 50,
        "higher_is_better": False,
    }
    rolled_back = 0
    for _ in range(400):
        first, other = (np.cumsum(rng.random(3_000) < rate)[looks - 1] for rate in (treatment, control))
        rolled_back += any(
            judge_harm(summary_of(int(a), int(n)), summary_of(int(b), int(n)), binary=True, **rules).proven
            for a, b, n in zip(first, other, looks, strict=True)
        )
    assert low <= rolled_back / 400 <= high


@pytest.mark.parametrize("also_control", [False, True])
def test_a_treatment_that_fails_more_sessions_than_the_control_is_rolled_back(tmp_path, also_control):
    now = [1_000_000.0]
    stores = open_stores(f"sqlite:///{tmp_path}/experiments.db", clock=lambda: now[0])
    config = parse_config(ExperimentConfig, {"name": "exp", "arms": {arm: {"bundle": arm} for arm in "ab"}})
    stored = config.model_dump(mode="json") | {"salt": "s", "control": "a"}
    for arm in "ab":
        stored["arms"][arm]["digest"] = arm
    stores.experiments.open("exp", stored)
    arms = {f"u{k}": "ab"[k % 2] for k in range(1_000)}
    stores.units.record_exposures(
        [Exposure("exp", unit, Assignment(arm, 1, 0.5), now[0]) for unit, arm in arms.items()]
    )
    failing = [f"u{k}" for k in range(1_000) if k // 2 % 10 == 0 and (also_control or arms[f"u{k}"] == "b")]
    stores.units.record("exp", [Report(unit, {"error": 1.0}) for unit in failing], "gateway")
    decision = decide(stores.experiments, stores.evidence, config)
    assert decision is not None and decision.step is RampStep.HOLD  # no session's window is over
    now[0] += config.outcome_window_s + 2
    decision = decide(stores.experiments, stores.evidence, config)
    assert decision is not None
    assert (decision.step, decision.reason == "harm proven by error") == (
        (RampStep.HOLD, False) if also_control else (RampStep.ROLLBACK, True)
    )
    stores.close()
