"""Metrics with bounds and margins that are parts of the control's mean, from the database to the decision."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores.clocked_experiments import KEYS, WINDOW, describe_experiment, look, open_experiment, refusal, sessions
from stores.single_reports import record_metrics, record_outcome

from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import Action
from marl_ray.experiments.ramp_steps import RampStep
from marl_ray.experiments.statistics import sequential
from marl_ray.experiments.statistics.bets import BettingTest, Claim, shifted_ends
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.reports import Report
from marl_ray.serving.administration.remote_experiments import report_lines
from marl_ray.serving.pages.render import experiment_page
from marl_ray.serving.ramp_decisions.questions import HARM, PROMOTION, bet_questions_of
from marl_ray.serving.ramp_decisions.ramp_control import decide


def test_every_replica_bets_alike_whenever_it_looks_and_only_on_judged_units(stores, clock, tmp_path):
    config = open_experiment(stores, bounds=[-1, 3], margin=0.1)
    other = open_stores(f"sqlite:///{tmp_path}/experiments.db", clock)
    rng, rows = np.random.default_rng(0), []
    reported: dict[str, float | None] = {}

    def value(arm: str, k: int) -> float | None:
        reported[f"{prefix}{k}"] = value_drawn = None if k % 7 == 0 else float(rng.uniform(-1, 3))
        return value_drawn

    for part in range(4):
        prefix = f"p{part}-"
        rows += sorted(sessions(stores, 60, value, prefix), key=lambda row: row.unit)
        clock.now += WINDOW / 2
        look(stores, config)
        if part == 1:  # other shares
            record = stores.experiments.read("exp")
            weights = {"a": {"bundle": "bundle-a", "weight": 3.0}, "b": {"bundle": "bundle-b"}}
            config = open_experiment(stores, bounds=[-1, 3], margin=0.1, arms=weights)
            assert stores.experiments.read("exp").epoch > record.epoch
    assert 0 < look(stores, config).look.summary("outcome", "a").n < 120
    clock.now += 2 * WINDOW
    for side in (HARM, PROMOTION):
        expected = BettingTest(Claim(side, -1.0, 3.0, 0.1))
        for row in rows:
            outcome = reported[row.unit]
            if outcome is not None:
                share = 0.5 if row.assignment.epoch == 1 else 0.25
                expected.add(np.array([outcome]), np.array([row.assignment.arm == "b"]), np.array([share]))
        question = next(
            q for q in bet_questions_of(config, stores.experiments.read("exp").plan) if q.claim == expected.claim
        )
        for database in (stores, other):
            test = look(database, config).look.bets[question]
            assert test.n == expected.memory.n == sum(value is not None for value in reported.values())
            assert test.log_e == pytest.approx(expected.evidence().log_e, rel=1e-9)
    other.close()


def test_a_rare_large_loss_promotes_a_worse_arm_unless_the_outcome_has_bounds(stores, clock):
    """Nobody has seen the loss of 100 yet; only the bounds say that it may come."""
    config = open_experiment(stores, margin=0.4, strategy="gradual", stages=[0.5, 1.0])
    rng = np.random.default_rng(1)
    sessions(stores, 900, lambda arm, k: rng.normal())
    clock.now += 2 * WINDOW
    assert look(stores, config).promotion[0].test.proven
    config = open_experiment(stores, margin=0.4, strategy="gradual", stages=[0.5, 1.0], bounds=[-110, 10])
    answer = look(stores, config).promotion[0]
    assert not answer.test.proven and answer.test.bound < -0.4 and answer.test.gain > -0.2
    config = open_experiment(stores, margin=0.4, strategy="gradual", stages=[0.5, 1.0], winsorize=[-4, 4])
    assert look(stores, config).promotion[0].test.proven
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.NEXT_STAGE


def test_harm_is_proven_by_the_bets_and_rolls_back(stores, clock):
    config = open_experiment(stores, bounds=[0, 1])
    sessions(stores, 600, lambda arm, k: k % 10 < (4 if arm == "b" else 8))
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.HOLD
    clock.now += 2 * WINDOW
    (harm,) = look(stores, config).harm
    assert harm.test.proven and harm.test.e_value >= 20
    assert harm.test.gain - 1e-9 <= harm.test.bound < -0.02
    report = json.loads(json.dumps(describe_experiment(stores, config), allow_nan=False))
    low, high = report["arms"]["b"]["difference_interval"]
    assert -0.6 < low < report["arms"]["b"]["difference"] < high < 0
    assert report["arms"]["b"]["verdict"] == "worse"
    assert decide(stores.experiments, stores.evidence, config).step is RampStep.ROLLBACK


def test_values_outside_bounds_are_refused_and_winsorized_ones_kept_as_they_came(stores, clock):
    rail = {"name": "cost", "bounds": [0, 5]}, {"name": "latency_s", "winsorize": [0, 2]}
    config = open_experiment(stores, bounds=[-1, 1], guardrails=rail)
    rows = sessions(stores, 40, lambda arm, k: None)
    unit = rows[0].unit
    for values, words in (
        ({"outcome": 1.5}, r"value: expected a number from -1 to 1, its bounds, got 1.5"),
        ({"cost": -1.0}, r"metrics.cost: expected a number from 0 to 5, its bounds, got -1.0"),
    ):
        with pytest.raises(MarlRayError, match=words):
            record_metrics(stores.units, "exp", unit, values)
    for row in rows:
        record_outcome(stores.units, "exp", row.unit, 1.0)
        record_metrics(stores.units, "exp", row.unit, {"cost": 5.0, "latency_s": 100.0 if row is rows[0] else 1.0})
    clock.now += 2 * WINDOW
    sums = look(stores, config).look
    arm = rows[0].assignment.arm
    n = sum(row.assignment.arm == arm for row in rows)
    assert sums.summary("latency_s", arm).mean == pytest.approx((n + 1) / n)
    assert dict(stores.units.metric_values("exp", "latency_s"))[unit] == 100.0
    assert sums.summary("outcome", arm).mean == 1.0


def test_what_stands_for_a_missing_outcome_lies_within_its_range(stores, clock):
    config = open_experiment(stores, winsorize=[0, 1], missing=-50)
    sessions(stores, 60, lambda arm, k: 1.0 if k % 2 else None)
    clock.now += 2 * WINDOW
    judged = look(stores, config)
    assert judged.look.summary("outcome", "a").mean == pytest.approx(0.5, abs=0.25)
    assert judged.look.bets[next(iter(judged.look.bets))].n == 60


@pytest.mark.parametrize("bounds", [None, [0.0, 10.0]])
def test_a_margin_may_be_a_part_of_the_controls_mean(stores, clock, bounds):
    """Means of 4 and 3.6: within 30 %, not within 1 %; a guardrail whose smaller values are better likewise."""
    rails = [{"name": "cost", "margin": "5%", "bounds": bounds}, {"name": "latency_s", "margin": "50%"}]
    config = open_experiment(stores, margin="30%", bounds=bounds, guardrails=rails)
    rng = np.random.default_rng(2)
    rows = sessions(stores, 900, lambda arm, k: (3.6 if arm == "b" else 4.0) + rng.uniform(-1, 1))
    reports = []
    for row in rows:
        factor = 1.2 if row.assignment.arm == "b" else 1.0
        numbers = {"cost": factor * rng.uniform(2, 4), "latency_s": factor * rng.uniform(0.5, 1)}
        reports.append(Report(row.unit, numbers))
    stores.units.record("exp", reports)
    clock.now += 2 * WINDOW
    results = look(stores, config)
    (promotion,), (harm,) = results.promotion, results.harm
    assert promotion.test.proven and not harm.test.proven
    assert promotion.margin == pytest.approx(1.2, abs=0.05) and promotion.test.gain == pytest.approx(-0.4, abs=0.1)
    assert (promotion.test.bound > -promotion.margin) and promotion.test.bound < promotion.test.gain
    cost, latency, _ = results.guardrails
    assert cost.test.proven and cost.test.bound < -cost.margin
    assert not latency.test.proven
    tight = open_experiment(stores, margin="1%", bounds=bounds, guardrails=rails)
    assert not look(stores, tight).promotion[0].test.proven
    assert look(stores, tight).harm[0].test.proven
    assert json.dumps(describe_experiment(stores, tight), allow_nan=False)


def test_a_part_of_a_mean_that_is_not_above_zero_proves_nothing(stores, clock):
    config = open_experiment(stores, margin="10%")
    sessions(stores, 400, lambda arm, k: -5.0 + k % 3 - (arm == "b"))
    clock.now += 2 * WINDOW
    results = look(stores, config)
    assert not results.harm[0].test.proven and not results.promotion[0].test.proven
    assert json.dumps(describe_experiment(stores, config), allow_nan=False)


@pytest.mark.parametrize("strategy", ["ab", "gradual"])
def test_silence_that_counts_as_zeros_promotes_nobody(stores, clock, strategy):
    config = open_experiment(
        stores, bounds=[0, 1], margin=0.05, missing=0, strategy=strategy, promotion="automatic", stages=[0.5, 1]
    )
    sessions(stores, 1_000, lambda arm, k: None)
    clock.now += 2 * WINDOW
    decision = decide(stores.experiments, stores.evidence, config)
    assert (decision.step, decision.reason) == (RampStep.HOLD, "no client has sent an outcome of any session")
    assert describe_experiment(stores, config)["warnings"][0] == decision.reason


def test_clusters_keep_the_other_test(stores, clock):
    config = open_experiment(stores, bounds=[0, 1], randomize="cluster")
    sessions(stores, 800, lambda arm, k: (k % 10 < 8) - 0.6 * (arm == "b" and k % 10 < 8), clusters=80)
    clock.now += 2 * WINDOW
    results = look(stores, config)
    assert not results.look.bets and results.harm[0].test.proven


def test_an_epoch_without_the_control_proves_nothing(stores, clock):
    config = open_experiment(stores, bounds=[0, 1])
    sessions(stores, 100, lambda arm, k: k % 2)
    clock.now += 2 * WINDOW
    before = look(stores, config)
    record = stores.experiments.read("exp")
    stores.experiments.change("exp", Action.PROMOTE, epoch=record.epoch, actor="test", reason="")
    sessions(stores, 300, lambda arm, k: 0.0, "late")
    clock.now += 2 * WINDOW
    after = look(stores, config)
    assert after.look.summary("outcome", "b").n > before.look.summary("outcome", "b").n
    assert {q: bet.log_e for q, bet in after.look.bets.items()} == {q: bet.log_e for q, bet in before.look.bets.items()}
    assert all(math.isfinite(bet.log_e) for bet in after.look.bets.values())


@pytest.mark.parametrize("bounds", [[1, 1], [2, 1], [0], "0,1", [0, math.inf], [False, True]])
def test_bounds_are_two_growing_finite_numbers(bounds):
    assert "bounds: expected [low, high] with low < high" in refusal(bounds=bounds)


@pytest.mark.parametrize(
    "margin", ["2", "x%", "0%", "100%", -1, {"relative": 1.5}, {"relative": 0.1, "more": 1}, True, None, math.inf]
)
def test_a_margin_is_a_number_or_a_share(margin):
    assert "margin: expected a number" in refusal(margin=margin)


def test_what_configs_say_of_measures_is_checked():
    assert "bounds, winsorize: expected one of them" in refusal(bounds=[0, 1], winsorize=[0, 1])
    assert "margin: expected a number above 0" in refusal(margin=0)
    assert "needs a metric that is 0 or more" in refusal(margin="2%", bounds=[-1, 1])
    rail = {"name": "cost"}
    assert "guardrails.0" in refusal(guardrails=[rail | {"margin": "2%", "winsorize": [-1, 1]}])
    assert "expected either binary" in refusal(guardrails=[rail | {"binary": True, "bounds": [0, 1]}])
    assert "those of the outcome" in refusal(guardrails=[{"name": "outcome", "bounds": [0, 1]}])
    config = parse_config(ExperimentConfig, KEYS | {"margin": " 2.5% ", "guardrails": [rail | {"margin": "1%"}]})
    assert config.margin.relative == pytest.approx(0.025)
    assert parse_config(ExperimentConfig, config.model_dump(mode="json")) == config
    assert config.unbounded == ("outcome", "cost")
    checked = parse_config(
        ExperimentConfig, KEYS | {"bounds": [0, 1], "guardrails": [{"name": "error"}, rail | {"winsorize": [0, 9]}]}
    )
    assert checked.unbounded == () and checked.range_of("cost") == (0, 9)


def test_an_outcome_without_bounds_is_warned_of(stores):
    config = open_experiment(stores, guardrails=[{"name": "cost"}, {"name": "error"}])
    report = describe_experiment(stores, config)
    (warning,) = report["warnings"]
    assert warning == "A rare large value can mislead the tests of outcome, cost: declare bounds or winsorize."
    assert f"  warning: {warning}" in report_lines(report)
    assert warning in experiment_page(report, {}, [], "").decode()
    bounded = open_experiment(stores, bounds=[0, 1], margin="2%", guardrails=[{"name": "cost", "winsorize": [0, 9]}])
    report = describe_experiment(stores, bounded)
    assert report["warnings"] == [] and not any("warning" in line for line in report_lines(report))
    assert "rare large value" not in experiment_page(report, {}, [], "").decode()


def test_arms_of_the_same_weights_are_warned_of(stores):
    config = open_experiment(stores, bounds=[0, 1])
    stored = stores.experiments.read("exp").config
    for arm, part in stored["arms"].items():
        part["weights_sha256"] = f"weights of {arm}"
    stores.experiments.open("exp", stored)
    assert describe_experiment(stores, config)["warnings"] == []
    for part in stored["arms"].values():
        part["weights_sha256"] = "the same"
    stores.experiments.open("exp", stored)
    (warning,) = describe_experiment(stores, config)["warnings"]
    assert warning.startswith("Arms a, b have the same weights: ")


def test_bets_hold_at_both_ends_of_outcomes_that_one_arm_lacks(stores, clock):
    """Every seventh outcome of the treatment is missing: a failure, as it happens."""
    config = open_experiment(stores, bounds=[0, 1], margin=0.02)
    sessions(stores, 900, lambda arm, k: None if arm == "b" and k % 7 == 0 else float(k % 7 != 0))
    clock.now += 2 * WINDOW
    results = look(stores, config)
    (fit,) = results.promotion
    assert fit.has_missing and fit.test.gain == pytest.approx(0.15, abs=0.03) and not fit.test.proven
    bets = {q.claim.missing: bet for q, bet in results.look.bets.items() if q.claim.side == 1}
    assert bets[None].log_e > math.log(20) > min(bets["low"].log_e, bets["high"].log_e)
    assert fit.test.e_value == pytest.approx(math.exp(min(bets["low"].log_e, bets["high"].log_e)))
    low, high = describe_experiment(stores, config)["arms"]["b"]["difference_interval"]
    assert low < 0 < high  # what the treatment lacks may have been failures


@pytest.mark.parametrize(
    ("randomize", "bounds"),
    [
        ("session", {}),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("session", {"bounds": [0, 1]}), ("cluster", {}))),
    ],
)
def test_successes_that_one_arm_reports_later_are_no_harm(stores, clock, randomize, bounds):
    """One in twenty succeeds and half of the failures report; two of five of the treatment's successes come too late."""
    config = open_experiment(stores, randomize=randomize, min_outcomes=50, margin=1e-4, **bounds)
    rng = np.random.default_rng(2)

    def value(arm: str, k: int) -> float | None:
        if rng.random() < 0.05:
            return 1.0 if arm == "a" or rng.random() < 0.6 else None
        return 0.0 if rng.random() < 0.5 else None

    for part in range(4):
        sessions(stores, 5_000, value, f"p{part}-", 1_250 if randomize == "cluster" else 0)
    clock.now += 2 * WINDOW
    results = look(stores, config)
    (harm,) = results.harm
    assert harm.has_missing and not harm.test.proven and not results.reporting[0].test.alarm
    pair = results.look.pair("outcome", "b", "a", 2)
    plain = {"alpha": 0.05, "margin": 0.0, "min_outcomes": 50}
    assert randomize == "cluster" or sequential.judge_harm(*pair, **plain).proven  # of those who report, it is one
    (warning,) = [text for text in describe_experiment(stores, config)["warnings"] if "do not count" in text]
    assert "judged sessions of 'b' and the control report no 'outcome'" in warning


def test_harm_among_those_who_report_is_found_at_both_ends(stores, clock):
    """The same half of both arms is silent."""
    config = open_experiment(stores, margin=0.05)
    sessions(stores, 3_000, lambda arm, k: None if k % 2 else float(k % 20 < (8 if arm == "b" else 16)))
    clock.now += 2 * WINDOW
    (harm,) = look(stores, config).harm
    assert harm.has_missing and harm.test.proven and -0.4 < harm.test.bound < -0.05


@given(
    st.lists(st.floats(-3, 5), min_size=1, max_size=30),
    st.lists(st.floats(-3, 5), max_size=30),
    st.integers(0, 40),
    st.booleans(),
    st.floats(0, 2),
)
def test_an_excess_of_reports_cannot_look_worse_at_both_ends(both, excess, silent, of_treatment, margin):
    """Arms alike among those who report with either; one of them makes others report, any of them."""
    low, high = min(both + excess), max(both + excess)
    everybody = len(both) + len(excess) + silent
    more, fewer = both + excess, both
    treatment, control = (more, fewer) if of_treatment else (fewer, more)
    sums = []
    for end in shifted_ends(low, high, margin, 1.0):
        worse = sum(y + margin - end for y in treatment) - sum(y - end for y in control)
        sums.append(worse / everybody)
    assert max(sums) >= -1e-9
