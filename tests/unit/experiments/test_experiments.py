"""Assignment and statistics."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import lambertw

from marl_ray.experiments.assignment.rendezvous import (
    AssignmentTable,
    arm_prefix,
    is_in_layer,
    staged_weights,
    uniform_of_key,
)
from marl_ray.experiments.designs.adjustment import summarise
from marl_ray.experiments.statistics.intervals import Interval, Summary, Verdict, tune_rho, verdict
from marl_ray.experiments.statistics.sequential import judge_harm, judge_promotion, mean_interval

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=2)
UNITS = st.builds(
    lambda stem, count: [f"{stem}{k}" for k in range(count)],
    st.text(max_size=20).filter(str.isprintable),
    st.integers(1, 30),
)
"""Names of units with any printable beginning; drawing every name by itself takes longer than the tests."""


@given(WEIGHTS, st.text(max_size=5), UNITS)
def test_assignment_depends_on_salt_weights_and_unit_only(weights, salt, units):
    forward = AssignmentTable(weights, salt, 1)
    backward = AssignmentTable(dict(reversed(weights.items())), salt, 1)
    scaled = AssignmentTable({arm: 8 * weight for arm, weight in weights.items()}, salt, 1)
    for unit in units:
        assert forward.assign(unit) == backward.assign(unit)
        assert forward.assign(unit).arm == scaled.assign(unit).arm
        assert forward.assign(unit).propensity == weights[forward.assign(unit).arm] / math.fsum(weights.values())


@given(WEIGHTS, st.floats(1, 50), UNITS, st.data())
def test_raising_one_weight_moves_units_only_into_that_arm(weights, factor, units, data):
    raised = data.draw(st.sampled_from(sorted(weights)))
    before = AssignmentTable(weights, "s", 1)
    after = AssignmentTable(weights | {raised: weights[raised] * factor}, "s", 2)
    without = AssignmentTable(weights | {"new": 1.0}, "s", 3)
    for unit in units:
        assert after.assign(unit).arm in (before.assign(unit).arm, raised)
        assert without.assign(unit).arm in (before.assign(unit).arm, "new")


def test_shares_follow_the_weights():
    weights = {"a": 1.0, "b": 2.0, "c": 5.0, "off": 0.0}
    table = AssignmentTable(weights, "salt", 1)
    arms = [table.assign(f"session-{i}").arm for i in range(100_000)]
    counts = [arms.count(arm) for arm in "abc"]
    assert sum(counts) == len(arms)
    # A sample-ratio-mismatch test: the usual alarm is p < 0.001.
    assert stats.chisquare(counts, [len(arms) * weights[arm] / 8 for arm in "abc"]).pvalue > 0.001


def test_salts_are_independent():
    first, second = AssignmentTable({"a": 1, "b": 1}, "one", 1), AssignmentTable({"a": 1, "b": 1}, "two", 1)
    same = sum(first.assign(str(i)).arm == second.assign(str(i)).arm for i in range(10_000))
    assert abs(same - 5_000) < 250


def unit_hash(salt: str, arm: str, unit: str) -> float:
    """The draw of one arm for one unit: in (0, 1], from 64 bits of blake2b."""
    return uniform_of_key(arm_prefix(salt, arm), unit.encode())


def test_draws_are_uniform_and_pinned():
    draws = [unit_hash("salt", "arm", str(i)) for i in range(20_000)]
    assert stats.kstest(draws, "uniform").pvalue > 0.001
    # Fixed for good: another value would move every session of every running experiment.
    assert unit_hash("salt", "arm", "unit") == PINNED
    assert unit_hash("a", "bc", "d") != unit_hash("ab", "c", "d")


PINNED = 0.9785651954287584


@pytest.mark.parametrize("weights", [{"a": 0.0, "b": 0.0}, {"a": -1.0, "b": 2.0}, {"a": math.nan}, {"a": math.inf}, {}])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        AssignmentTable(weights, "s", 1)


@given(WEIGHTS, st.floats(0, 1), st.floats(0, 1), UNITS)
def test_a_larger_share_moves_units_only_from_the_control_into_a_treatment(weights, smaller, other, units):
    control, (low, high) = min(weights), sorted((smaller, other))
    before = AssignmentTable(staged_weights(weights, control, low), "s", 1)
    after = AssignmentTable(staged_weights(weights, control, high), "s", 2)
    assert math.fsum(after.weights[arm] for arm in weights if arm != control) == pytest.approx(high)
    for unit in units:
        assert (
            after.assign(unit).arm == before.assign(unit).arm
            or before.assign(unit).arm == control != after.assign(unit).arm
        )


def test_staged_shares_are_met():
    weights = staged_weights({"a": 9.0, "b": 1.0, "c": 3.0, "off": 0.0}, "a", 0.2)
    assert weights == pytest.approx({"a": 0.8, "b": 0.05, "c": 0.15, "off": 0.0})
    assert staged_weights({"a": 9.0, "b": 0.0}, "a", 0.5) == {"a": 1.0, "b": 0.0}
    with pytest.raises(ValueError, match="share must be in"):
        staged_weights({"a": 1.0, "b": 1.0}, "a", 1.1)


@given(st.text(max_size=9), st.text(max_size=9), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_disjoint_shares_of_a_layer_have_no_unit_in_common_and_miss_none(layer, unit, cuts):
    edges = [0.0, *sorted(cuts), 1.0]
    assert sum(is_in_layer(layer, share, unit) for share in pairwise(edges)) == 1


def test_places_in_a_layer_are_uniform_pinned_and_independent():
    grid = np.linspace(0, 1, 21)
    counts = [sum(is_in_layer("l", share, f"u{i}") for i in range(5_000)) for share in pairwise(grid)]
    assert stats.chisquare(counts).pvalue > 0.001
    both = sum(is_in_layer("l", (0, 0.5), f"u{i}") and is_in_layer("m", (0, 0.5), f"u{i}") for i in range(5_000))
    assert abs(both - 1_250) < 120
    # Fixed for good: another value would mix the populations of running experiments.
    assert [is_in_layer("layer", (0, 0.5), f"u{i}") for i in range(8)] == IN_FIRST_HALF


IN_FIRST_HALF = [False, True, True, False, False, False, False, False]


@settings(max_examples=30)
@given(st.floats(0.001, 0.9), st.floats(1, 1e6))
def test_rho_is_the_lambert_solution_and_tightest_at_its_n(alpha, n):
    rho = tune_rho(n, alpha)
    assert rho == pytest.approx(n / (-lambertw(-(alpha**2) / math.e, -1).real - 1), rel=1e-6)
    widths = [
        math.sqrt((n + rho * by) * math.log((n + rho * by) / (rho * by * alpha**2)))  # 1810.08240, proposition 5
        for by in (0.8, 1.0, 1.25)
    ]
    assert widths[1] == min(widths)


def difference_interval(treatment: Summary, control: Summary, *, alpha: float, min_outcomes: int) -> Interval:
    """Both tests' bounds, half of alpha each, as the report has them."""
    rules = {"alpha": alpha / 2, "margin": 0.0, "min_outcomes": min_outcomes}
    below, above = judge_promotion(treatment, control, **rules), judge_harm(treatment, control, **rules)
    return Interval(below.gain, below.bound, above.bound)


def test_a_real_difference_is_found():
    rng = np.random.default_rng(0)
    control, treatment = rng.normal(0.5, 0.3, 800), rng.normal(0.65, 0.3, 800)
    summaries = [Summary(len(x), x.mean(), x.var(ddof=1)) for x in (treatment, control)]
    interval = difference_interval(*summaries, alpha=0.05, min_outcomes=50)
    assert verdict(interval, 0.02) == "better"
    mirrored = difference_interval(*reversed(summaries), alpha=0.05, min_outcomes=50)
    assert verdict(mirrored, 0.02) == "worse"
    assert interval.low < 0.15 < interval.high
    shared = difference_interval(*summaries, alpha=0.05 / 4, min_outcomes=50)
    assert shared.low < interval.low < interval.high < shared.high
    assert difference_interval(*summaries, alpha=0.05, min_outcomes=801).low == -math.inf


@pytest.mark.parametrize("draw", ["normal", "lognormal", "rare"])
def test_what_a_canary_shows_is_wrong_at_any_look_with_probability_alpha_at_most(draw):
    """1:9 traffic without a difference, looked at after every ten of the canary's outcomes from the first allowed on."""
    rng, looks, missed, means_missed = np.random.default_rng(7), range(50, 601, 10), 0, 0
    for _ in range(RUNS):
        first, other = (
            {
                "normal": rng.standard_normal,
                "lognormal": lambda n: np.exp(rng.standard_normal(n)),
                "rare": lambda n: np.where(rng.random(n) < 0.05, 1.0, 0.0),
            }[draw](n)
            for n in (600, 5_400)
        )
        mean = {"normal": 0.0, "lognormal": math.exp(0.5), "rare": 0.05}[draw]
        differs = off = False
        for k in looks:
            canary, control = summarise(first[:k]), summarise(other[: 9 * k])
            interval = difference_interval(canary, control, alpha=0.05, min_outcomes=50)
            differs |= not interval.low <= 0 <= interval.high
            around = mean_interval(canary, max(canary.variance, control.variance), alpha=0.05, min_outcomes=50)
            off |= not around.low <= mean <= around.high
        missed, means_missed = missed + differs, means_missed + off
    assert missed <= 0.05 * RUNS
    assert means_missed <= 0.05 * RUNS


RUNS = 120


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 0.2, Verdict.BETTER),
        (-0.01, 0.2, Verdict.NON_INFERIOR),
        (-0.01, -0.005, Verdict.NON_INFERIOR),
        (-0.3, -0.001, Verdict.WORSE),
        (-0.3, 0.3, Verdict.UNDECIDED),
        (-math.inf, math.inf, Verdict.UNDECIDED),
    ],
)
def test_verdicts(low, high, expected):
    interval = Interval((low + high) / 2, low, high)
    assert verdict(interval, 0.02) is expected


def test_constant_outcomes_prove_nothing_alone():
    zero, ones, mixed = Summary(60, 0.0, 0.0), Summary(60, 1.0, 0.0), Summary(60, 0.5, 0.25)

    def between(first: Summary, other: Summary) -> Interval:
        return difference_interval(first, other, alpha=0.05, min_outcomes=50)

    assert between(zero, ones).high == math.inf
    assert verdict(between(zero, mixed), 0.02) == "worse"
    assert mean_interval(zero, 0.0, alpha=0.05, min_outcomes=50).high == math.inf
    assert 0 < mean_interval(zero, 0.25, alpha=0.05, min_outcomes=50).high < 1
    nothing = Summary(0, math.nan, 0.0)
    assert math.isnan(between(nothing, ones).estimate)
    assert math.isnan(mean_interval(nothing, 0.25, alpha=0.05, min_outcomes=50).estimate)
