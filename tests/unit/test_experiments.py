"""Assignment and statistics."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import lambertw

from marl_ray.experiments.assignment import AssignmentTable, in_layer, staged_weights, unit_hash
from marl_ray.experiments.statistics import (
    Interval,
    Summary,
    Verdict,
    compare,
    difference_interval,
    fixed_interval,
    mean_interval,
    mixture_boundary,
    tune_rho,
    verdict,
)

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=2)
UNITS = st.lists(st.text(min_size=1, max_size=20).filter(lambda s: s.isprintable()), min_size=1, max_size=30)


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
    one, two = AssignmentTable({"a": 1, "b": 1}, "one", 1), AssignmentTable({"a": 1, "b": 1}, "two", 1)
    same = sum(one.assign(str(i)).arm == two.assign(str(i)).arm for i in range(10_000))
    assert abs(same - 5_000) < 250


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
def test_a_larger_share_moves_units_only_from_the_control_into_a_treatment(weights, one, other, units):
    control, (low, high) = min(weights), sorted((one, other))
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
    assert sum(in_layer(layer, share, unit) for share in pairwise(edges)) == 1


def test_places_in_a_layer_are_uniform_pinned_and_independent():
    grid = np.linspace(0, 1, 21)
    counts = [sum(in_layer("l", share, f"u{i}") for i in range(5_000)) for share in pairwise(grid)]
    assert stats.chisquare(counts).pvalue > 0.001
    both = sum(in_layer("l", (0, 0.5), f"u{i}") and in_layer("m", (0, 0.5), f"u{i}") for i in range(5_000))
    assert abs(both - 1_250) < 120
    # Fixed for good: another value would mix the populations of running experiments.
    assert [in_layer("layer", (0, 0.5), f"u{i}") for i in range(8)] == IN_FIRST_HALF


IN_FIRST_HALF = [False, True, True, False, False, False, False, False]


@settings(max_examples=30)
@given(st.floats(0.001, 0.9), st.floats(1, 1e6))
def test_rho_is_the_lambert_solution_and_tightest_at_its_n(alpha, n):
    rho = tune_rho(n, alpha)
    assert rho == pytest.approx(n / (-lambertw(-(alpha**2) / math.e, -1).real - 1), rel=1e-6)
    widths = [mixture_boundary(n, rho * factor, alpha) for factor in (0.8, 1.0, 1.25)]
    assert widths[1] == min(widths)


@pytest.mark.parametrize(("v", "rho", "alpha"), [(10.0, 3.0, 0.05), (200.0, 40.0, 0.01), (0.5, 7.0, 0.3)])
def test_boundary_is_where_the_mixture_martingale_reaches_one_over_alpha(v, rho, alpha):
    """The mixture of exp(lambda s - lambda^2 v / 2) over lambda ~ N(0, 1/rho), integrated numerically."""
    s = mixture_boundary(v, rho, alpha)
    grid = np.linspace(-40, 40, 400_001) / math.sqrt(rho + v)
    density = np.exp(-(grid**2) * rho / 2) * math.sqrt(rho / (2 * math.pi))
    mixture = np.trapezoid(np.exp(grid * s - grid**2 * v / 2) * density, grid)
    assert mixture == pytest.approx(1 / alpha, rel=1e-6)


def peeking_errors(draw, runs: int, n: int, first: int, alpha: float) -> tuple[float, float]:
    """Share of A/A runs in which any look from the `first` outcome per arm on finds a difference: ours, textbook."""
    a, b = draw((runs, n)), draw((runs, n))
    count = np.arange(1, n + 1)

    def moments(x):
        mean = x.cumsum(1) / count
        return mean, ((x**2).cumsum(1) - count * mean**2) / np.maximum(count - 1, 1)

    (mean_a, var_a), (mean_b, var_b) = moments(a), moments(b)
    total, rho = 2 * count, tune_rho(20 * first, alpha)
    deviation = np.sqrt(total * (var_a + var_b) / count)
    half = deviation / total * np.sqrt((total + rho) * np.log((total + rho) / (rho * alpha**2)))
    looks = slice(first - 1, None)
    gap = np.abs(mean_a - mean_b)[:, looks]
    textbook = stats.norm.ppf(1 - alpha / 2) * np.sqrt((var_a + var_b) / count)[:, looks]
    # The vectorised formula is the function under test.
    one = difference_interval(
        Summary(n, mean_a[0, -1], var_a[0, -1]), Summary(n, mean_b[0, -1], var_b[0, -1]), alpha, rho
    )
    assert one.high - one.estimate == pytest.approx(half[0, -1])
    return float((gap > half[:, looks]).any(1).mean()), float((gap > textbook).any(1).mean())


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.standard_normal,
        lambda rng: lambda size: (rng.random(size) < 0.2).astype(float),
        lambda rng: lambda size: rng.exponential(size=size),
    ],
    ids=["normal", "bernoulli", "exponential"],
)
def test_a_a_runs_watched_at_every_outcome_err_at_most_alpha(draw):
    ours, textbook = peeking_errors(draw(np.random.default_rng(7)), runs=600, n=3_000, first=50, alpha=0.05)
    assert ours <= 0.05
    assert textbook > 0.2  # what the sequence is for


def test_one_arms_mean_is_covered_at_all_times():
    rng, rho = np.random.default_rng(3), tune_rho(500, 0.05)
    x = rng.exponential(size=(400, 3_000))
    n = np.arange(1, 3_001)
    mean = x.cumsum(1) / n
    variance = ((x**2).cumsum(1) - n * mean**2) / np.maximum(n - 1, 1)
    half = np.sqrt(variance) / n * np.sqrt((n + rho) * np.log((n + rho) / (rho * 0.05**2)))
    interval = mean_interval(Summary(3_000, mean[0, -1], variance[0, -1]), 0.05, rho)
    assert interval.high - interval.low == pytest.approx(2 * half[0, -1])
    assert ((np.abs(mean - 1) > half)[:, 49:]).any(1).mean() <= 0.05


def test_a_real_difference_is_found():
    rng = np.random.default_rng(0)
    control, treatment = rng.normal(0.5, 0.3, 800), rng.normal(0.65, 0.3, 800)
    summaries = [Summary(len(x), x.mean(), x.var(ddof=1)) for x in (treatment, control)]
    assert compare(*summaries, alpha=0.05, margin=0.02, min_outcomes=50).verdict == "better"
    assert compare(*reversed(summaries), alpha=0.05, margin=0.02, min_outcomes=50).verdict == "worse"
    shared = compare(*summaries, alpha=0.05, margin=0.02, min_outcomes=50, treatments=4).difference
    assert shared.high > compare(*summaries, alpha=0.05, margin=0.02, min_outcomes=50).difference.high


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
    assert verdict(interval, 0.02, 50, 50) is expected
    assert verdict(interval, 0.02, 49, 50) is Verdict.UNDECIDED


def test_constant_outcomes_prove_nothing_alone():
    zero, ones, mixed = Summary(60, 0.0, 0.0), Summary(60, 1.0, 0.0), Summary(60, 0.5, 0.25)
    assert compare(zero, ones, alpha=0.05, margin=0.02, min_outcomes=50).verdict == "undecided"
    assert compare(zero, mixed, alpha=0.05, margin=0.02, min_outcomes=50).verdict == "worse"
    assert mean_interval(zero, 0.05, 100).high == math.inf
    assert math.isnan(compare(Summary(0, math.nan, 0), ones, alpha=0.05, margin=1, min_outcomes=1).difference.estimate)


def test_fixed_interval_is_the_textbook_one():
    interval = fixed_interval(Summary(100, 2.0, 4.0), 0.05)
    assert (interval.low, interval.high) == pytest.approx(stats.norm.interval(0.95, 2.0, 0.2))
    assert fixed_interval(Summary(1, 2.0, 0.0), 0.05).high == math.inf
