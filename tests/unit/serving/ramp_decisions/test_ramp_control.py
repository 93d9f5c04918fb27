"""A look's proofs, the decisions that follow, and their form in the API."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from clocks import Clock
from stores.migrated import migrate
from stores.single_reports import record_metrics
from stores.units import NOW, over

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.experiments.assignment.rendezvous import Assignment, AssignmentTable, draw_arm
from marl_ray.experiments.lifecycle import Action, ExperimentStatus
from marl_ray.experiments.ramp_steps import RampStep
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.ramp_decisions.ramp_control import config_of, decide, read_results
from marl_ray.serving.ramp_decisions.report import curves, describe


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = open_stores(migrate(f"sqlite:///{tmp_path}/experiments.db"), Clock(NOW))
    yield stores
    stores.close()


def open_experiment(stores: Stores, arms: str = "ab", **more: Any) -> ExperimentConfig:
    arm_configs = {arm: {"bundle": f"bundle-{arm}"} for arm in arms}
    data = {"name": "exp", "arms": arm_configs, "min_outcomes": 20, "min_duration_s": 0.0, "min_exposures": 10} | more
    config = parse_config(ExperimentConfig, data)
    stored = config.model_dump(mode="json") | {"salt": "s", "control": arms[0], "origin": "api"}
    for arm in arms:
        stored["arms"][arm]["digest"] = f"digest-{arm}"
    stores.experiments.open("exp", stored)
    return config


def sessions(stores: Stores, n: int, value, cluster=lambda k: None, prefix: str = "u", at=lambda k: 0.0) -> None:
    """Units that meet an arm as the store says and have an outcome `value(arm, k)` (none if that is None)."""
    state = stores.experiments.assignment_state("exp")
    table = AssignmentTable(state.weights, state.salt, state.epoch)
    rows = []
    for k in range(n):
        options = {"cluster": cluster(k), "at": at(k), "block_s": state.block_s}
        assignment, cluster_id = draw_arm(table, state.randomize, f"{prefix}{k}", **options)
        rows.append(Exposure("exp", f"{prefix}{k}", assignment, at(k), cluster_id))
    stores.units.record_exposures(rows)
    reported = [(row.unit, value(row.assignment.arm, k)) for k, row in enumerate(rows)]
    stores.units.record("exp", [Report(unit, {"outcome": number}) for unit, number in reported if number is not None])
    over(stores)


def metrics(stores: Stores, n: int, values) -> None:
    """Report metrics of the first `n` units: `values(arm, k)`, nothing if that is None."""
    stores.database.clock.now -= 1_000.0
    units = [f"u{k}" for k in range(n)]
    arms = stores.units.assignments([("exp", unit) for unit in units])
    reported = [(unit, values(arms["exp", unit].arm, k)) for k, unit in enumerate(units)]
    stores.units.record("exp", [Report(unit, value) for unit, value in reported if value is not None])
    over(stores)


def results_of(stores: Stores, config: ExperimentConfig):
    return read_results(stores.evidence, stores.experiments.read("exp"), config)


def test_weights_that_change_within_a_stage_are_no_mismatch(stores):
    config = open_experiment(stores, "abc", min_exposures=10**9)
    sessions(stores, 900, lambda arm, k: None)
    record = stores.experiments.read("exp")
    stores.experiments.change("exp", Action.ROLLBACK, epoch=record.epoch, actor="test", reason="", arm="c")
    sessions(stores, 900, lambda arm, k: None, prefix="later")
    results = results_of(stores, config)
    assert results.look.shares == {1: {"a": 1, "b": 1, "c": 1}, 2: {"a": 2, "b": 1, "c": 0}}
    assert sum(arm.exposures for arm in results.evidence.arms.values()) == 1_800
    assert not results.srm.alarm
    # A third of what the control should get: the weights of neither epoch.
    table = AssignmentTable({"a": 1.0, "b": 4.0, "c": 0.0}, "s", 2)
    stores.units.record_exposures([Exposure("exp", f"x{k}", table.assign(f"x{k}"), 0.0) for k in range(600)])
    assert results_of(stores, config).srm.alarm
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD_SRM


def test_a_mismatch_of_clusters_counts_clusters(stores):
    """Twenty sessions of each cluster would be a mismatch, were they twenty draws."""
    config = open_experiment(stores, randomize="cluster")
    chosen: dict[str, list[str]] = {"a": [], "b": []}
    table = AssignmentTable({"a": 1.0, "b": 1.0}, "s", 1)
    for k in range(500):
        chosen[table.assign(f"c{k}").arm].append(f"c{k}")
    clusters = chosen["a"][:24] + chosen["b"][:16]
    sessions(stores, 800, lambda arm, k: None, lambda k: clusters[k // 20])
    assert results_of(stores, config).look.exposed == {1: {"a": 480, "b": 320}}
    assert results_of(stores, config).look.assigned == {1: {"a": 24, "b": 16}}
    assert not results_of(stores, config).srm.alarm


@pytest.mark.parametrize("randomize", ["session", "cluster"])
def test_a_few_bad_clusters_are_no_proof_where_clusters_are_assigned(stores, randomize):
    """The treatment's sessions are worse, but only because they are of a few matches."""
    config = open_experiment(stores, randomize=randomize, min_exposures=10**9)
    luck = np.random.default_rng(0).normal(size=12)

    def value(arm: str, k: int) -> float:
        return luck[k // 50] + (k % 7 - 3) / 10 - 1.0 * (arm == "b")

    sessions(stores, 600, value, lambda k: f"match{k // 50}")
    decision = decide(stores.experiments, stores.evidence, config)
    if randomize == "session":
        assert (decision.step, decision.arm) == (RampStep.ROLLBACK, "b")
    else:
        assert decision.step is RampStep.HOLD
        assert results_of(stores, config).harm[0].treatment.n + results_of(stores, config).harm[0].control.n == 12


def test_a_switchback_rolls_back_on_blocks_that_are_over(stores):
    config = open_experiment(stores, randomize="switchback", block_s=60.0, washout_s=5.0, min_exposures=10**9)
    start = math.floor((stores.database.clock.now - 100 * 60) / 60) * 60.0

    def value(arm: str, k: int) -> float:
        bad = -2.0 if arm == "b" else 0.0
        # In the first five seconds the block before is still felt.
        return bad + (k % 5) / 5 + 10 * math.sin(k / 300) if k % 10 else 99.0

    sessions(stores, 1_000, value, at=lambda k: start + 6.0 * k + 0.5)
    results = results_of(stores, config)
    blocks = results.harm[0]
    assert blocks.treatment.n + blocks.control.n == 100
    assert abs(blocks.treatment.n - blocks.control.n) <= 2  # half a pair at either end
    assert blocks.test.gain == pytest.approx(-2.0, abs=0.5)
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.ROLLBACK
    assert stores.experiments.read("exp").state.status is ExperimentStatus.ROLLED_BACK


@pytest.mark.parametrize("randomize", ["session", "cluster"])
def test_a_treatment_that_answers_a_tenth_of_its_sessions_is_not_promoted(stores, randomize):
    """Only its happy sessions report."""
    config = open_experiment(stores, promotion="automatic", randomize=randomize)
    sessions(
        stores,
        820,
        lambda arm, k: None if arm == "b" and k % 10 else 1.0 + k % 3 / 10 + (arm == "b"),
        lambda k: f"c{k}",
    )
    results = results_of(stores, config)
    assert results.promotion[0].has_missing and not results.promotion[0].test.proven and not results.harm[0].test.proven
    (reports,) = results.reporting
    assert (reports.metric, reports.arm, reports.test.alarm) == ("outcome", "b", True)
    assert reports.reported < 60 and reports.judged > 300
    assert reports.control_reported == reports.control_judged
    decision = decide(stores.experiments, stores.evidence, config)
    assert decision.step is RampStep.HOLD_REPORTING
    sentence = f"'b' reports 'outcome' of {reports.reported} of {reports.judged} sessions, 'a' reports 'outcome' of "
    assert decision.reason.startswith(sentence)
    assert results.warnings == (decision.reason,)
    assert stores.experiments.read("exp").state.status is ExperimentStatus.RUNNING


def test_reports_of_few_that_are_as_few_in_both_arms_are_no_alarm(stores):
    config = open_experiment(stores, promotion="automatic")
    sessions(stores, 4_000, lambda arm, k: None if k % 10 else 1.0 + k % 3 / 10 + (arm == "b"))
    assert not results_of(stores, config).reporting[0].test.alarm
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.PROMOTE


def test_harm_by_what_is_reported_unequally_is_no_rollback_and_by_another_metric_is(stores, tmp_path):
    config = open_experiment(stores, guardrails=[{"name": "cost"}, {"name": "stress", "better": "lower"}])
    sessions(stores, 820, lambda arm, k: None if arm == "b" and k % 2 else k % 3 / 10 - (arm == "b"))
    assert results_of(stores, config).harm[0].test.proven
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD_REPORTING
    metrics(stores, 820, lambda arm, k: {"stress": k % 5 + 3.0 * (arm == "b")})
    fresh = open_stores(f"sqlite:///{tmp_path}/experiments.db", stores.database.clock)
    decision = decide(fresh.experiments, fresh.evidence, config)
    assert (decision.step, decision.reason) == (RampStep.ROLLBACK, "harm proven by stress")
    fresh.close()


def test_equal_arms_whose_successes_come_later_are_not_judged_before_their_window_is_over(stores):
    """Failures are told at once, the treatment's successes after nine minutes."""
    config = open_experiment(stores, promotion="automatic", min_exposures=10**9)
    state = stores.experiments.assignment_state("exp")
    table = AssignmentTable(state.weights, state.salt, state.epoch)
    late = []
    for minute in range(40):
        rows = [Exposure("exp", f"{minute}-{k}", table.assign(f"{minute}-{k}"), 0.0) for k in range(40)]
        stores.units.record_exposures(rows)
        for k, row in enumerate(rows):
            wait = 9 if row.assignment.arm == "b" and k % 2 else 0
            late.append((minute + wait, row.unit, float(k % 2)))
        stores.units.record("exp", [Report(unit, {"outcome": value}) for when, unit, value in late if when == minute])
        assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD
        stores.database.clock.now += 60.0
    results = results_of(stores, config)
    assert results.look.units["b"].judged == results.harm[0].treatment.n > 500
    assert results.harm[0].treatment.mean == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("guardrail", "sent", "reason"),
    [
        ({"name": "cost"}, lambda arm: None, "no client has sent 'cost' of a session, which a guardrail asks for"),
        (
            {"name": "violation"},
            lambda arm: None,
            "no client has sent 'violation' of a session, which a guardrail asks for",
        ),
        ({"name": "cost", "missing": 1.0}, lambda arm: None, "no client has sent 'cost' of a session"),
        ({"name": "cost"}, lambda arm: {"cost": 1.0} if arm == "a" else None, "'b' reports 'cost' of 0 of "),
        ({"name": "violation"}, lambda arm: {"violation": 0.0} if arm == "a" else None, None),
        ({"name": "error"}, lambda arm: None, None),
    ],
)
def test_a_guardrail_that_knows_nothing_holds_promotion_and_the_last_stage(stores, guardrail, sent, reason):
    stages = {"strategy": "gradual", "stages": [0.5, 1.0]}
    config = open_experiment(stores, guardrails=[guardrail], **stages)
    sessions(stores, 600, lambda arm, k: k % 3 / 10 + (arm == "b"))
    metrics(stores, 600, lambda arm, k: sent(arm))
    decision = decide(stores.experiments, stores.evidence, config)
    if reason is None:
        assert decision.step is RampStep.NEXT_STAGE
    else:
        assert decision.step in (RampStep.HOLD, RampStep.HOLD_REPORTING)
        assert decision.reason.startswith(reason)
        assert decision.reason in results_of(stores, config).warnings


def rail(**more: Any) -> dict[str, Any]:
    return {"guardrails": [{"name": "error", "margin": 0.02} | more]}


def test_rare_errors_have_the_exact_test_and_counts_of_errors_do_not(stores):
    config = open_experiment(stores, **rail())
    sessions(stores, 800, lambda arm, k: 0.0)
    metrics(stores, 800, lambda arm, k: {"error": float(arm == "b" and k % 4 == 0)})
    results = results_of(stores, config)
    assert (results.guardrails[0].name, results.guardrails[0].arm, results.guardrails[0].test.proven) == (
        "error",
        "b",
        True,
    )
    assert results.evidence.arms["b"].harm == "error"
    # One client counts: the values are not 0 or 1 any more, and the looks continue.
    state = stores.experiments.assignment_state("exp")
    stores.units.record_exposures([Exposure("exp", "x", Assignment("a", state.epoch, 0.5), 0.0)])
    record_metrics(stores.units, "exp", "x", {"error": 5_000.0})
    over(stores)
    assert not results_of(stores, config).guardrails[0].test.proven


def test_without_news_a_stage_still_ends_in_time(stores, tmp_path):
    config = open_experiment(stores, strategy="gradual", stages=[0.5, 0.9], min_duration_s=3_600.0)
    sessions(stores, 400, lambda arm, k: float(k % 2))
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD
    later = sa.create_engine(f"sqlite:///{tmp_path}/experiments.db")  # an hour passes
    with later.begin() as connection:
        connection.execute(sa.text("UPDATE experiments SET stage_since = stage_since - 3600"))
    later.dispose()
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.NEXT_STAGE


def test_a_promoted_arm_is_not_judged_by_what_comes_after(stores):
    """Without a control nothing more is proven, whatever the season does to the outcomes."""
    config = open_experiment(stores, promotion="manual")
    sessions(stores, 400, lambda arm, k: float(k % 5) + (arm == "b"))
    record = stores.experiments.read("exp")
    stores.experiments.change("exp", Action.PROMOTE, epoch=record.epoch, actor="test", reason="")
    sessions(stores, 400, lambda arm, k: float(k % 5) - 9.0, prefix="later")
    results = results_of(stores, config)
    assert results.look.units["b"].exposures > 500
    assert not results.harm[0].test.proven and results.harm[0].test.gain == pytest.approx(1.0, abs=0.5)
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD
    # Late outcomes of the experiment's own sessions still count.
    stores.units.record_exposures([Exposure("exp", f"x{k}", Assignment("b", 1, 0.5), 0.0) for k in range(200)])
    stores.units.record("exp", [Report(f"x{k}", {"outcome": -9.0}) for k in range(200)])
    over(stores)
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.ROLLBACK


def describe_experiment(stores: Stores, config: ExperimentConfig, arms: dict | None = None) -> dict[str, Any]:
    record = stores.experiments.read("exp")
    report = describe(
        record,
        config_of(record),
        arms or {},
        read_results(stores.evidence, record, config),
        stores.units.shadow_totals("exp"),
    )
    return json.loads(json.dumps(report, allow_nan=False))


def test_an_experiment_without_units_can_be_told(stores):
    config = open_experiment(stores, "abc", endpoint="game", autostart=False, **rail())
    assert config_of(stores.experiments.read("exp")) == config.model_copy(update={"salt": "s"})
    report = describe_experiment(stores, config)
    assert (report["endpoint"], report["randomize"], report["status"], report["winner"]) == (
        "game",
        "session",
        "draft",
        None,
    )
    assert report["decision"] == {"step": "hold", "arm": None, "reason": "the experiment is draft"}
    assert report["srm"] == {"p_value": 1.0, "alarm": False}
    assert report["arms"]["b"]["verdict"] == "undecided"
    assert {
        report["arms"]["c"][key] for key in ("mean", "interval", "difference", "difference_interval", "lineage")
    } == {None}
    assert report["arms"]["c"]["digest"] == "digest-c"
    assert "verdict" not in report["arms"]["a"]
    assert [(row["name"], row["arm"], row["n"], row["bound"]) for row in report["guardrails"]] == [
        ("error", "b", 0, None),
        ("error", "c", 0, None),
    ]


def test_an_experiment_is_told_with_its_tests_and_intervals(stores):
    config = open_experiment(stores, guardrails=[{"name": "cost"}], stages=[0.5, 1.0], strategy="gradual")
    rng = np.random.default_rng(4)
    sessions(stores, 600, lambda arm, k: float(rng.normal()) + (arm == "b"))
    metrics(stores, 600, lambda arm, k: {"cost": float(rng.normal())})
    stores.units.record_shadows("exp", "r", {"b": {"acts": 3}})
    report = describe_experiment(stores, config, {"b": {"digest": "full", "lineage": {"run": "r"}}})
    b, a = report["arms"]["b"], report["arms"]["a"]
    assert (b["digest"], b["lineage"], b["bundle"], b["propensity"]) == ("full", {"run": "r"}, "bundle-b", 0.5)
    assert b["exposures"] + a["exposures"] == b["outcomes"] + a["outcomes"] == 600
    assert b["verdict"] == "better" and b["difference_interval"][0] < 1.0 < b["difference_interval"][1]
    assert b["difference_interval"][0] < b["difference"] < b["difference_interval"][1]
    assert a["interval"][0] < 0.0 < a["interval"][1]
    assert b["promotion"]["proven"] and b["promotion"]["e_value"] > 20 and not b["harm"]["proven"]
    assert report["stages"] == [0.5, 1.0] and report["shadow"]["b"]["acts"] == 3
    assert report["decision"]["step"] == "next_stage"
    cost, errors = report["guardrails"]
    assert (errors["name"], errors["margin"], errors["proven"]) == ("error", 0.01, False)
    assert (cost["better"], cost["n"], cost["control_n"]) == ("lower", b["outcomes"], a["outcomes"])
    assert cost["gain"] == pytest.approx(cost["control_mean"] - cost["mean"])


def test_curves_have_bounds_once_there_are_enough_outcomes_and_end_at_the_mean(stores):
    config = open_experiment(stores)
    sessions(stores, 200, lambda arm, k: float(k % 5))
    drawn = curves(stores.evidence.series("exp", 10), config)
    assert drawn.keys() == {"a", "b"}
    for arm, rows in drawn.items():
        seen = results_of(stores, config).look.summary("outcome", arm)
        *_, (at, n, mean, low, high) = rows
        assert (n, mean) == (seen.n, pytest.approx(seen.mean))
        assert low < mean < high and at <= stores.database.clock.now
        assert all((low is None) == (high is None) and (low is not None or n < 20) for _, n, _, low, high in rows)
    assert curves({}, config) == {}


@pytest.mark.parametrize("more", [
    {"promotion": "automatic"}, {"strategy": "gradual", "stages": [0.5, 1.0]}, {"strategy": "thompson", "reweigh_s": 1e-9},
])  # fmt: skip
def test_an_experiment_whose_arm_was_rolled_back_in_another_holds_and_says_so(stores, more):
    config = open_experiment(stores, **more)
    other = stores.experiments.read("exp").config | {"name": "other", "salt": "o", "endpoint": "elsewhere"}
    stores.experiments.open("other", other)
    sessions(stores, 2_000, lambda arm, k: 1.0 if arm == "b" else 0.0)
    stores.experiments.change("other", Action.ROLLBACK, epoch=None, actor="test", reason="", arm="b")
    reason = r"^experiment 'exp': arms\.b: the weights of bundle digest-b have been rolled back in experiment 'other'; "
    decision = decide(stores.experiments, stores.evidence, config)
    assert decision.step is RampStep.HOLD and re.match(reason, decision.reason)
    record = stores.experiments.read("exp")
    assert record.epoch == 1
    report: Any = describe(record, config, {}, results_of(stores, config), {})
    assert re.match(reason, report["decision"]["reason"])
