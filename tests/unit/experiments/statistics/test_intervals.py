"""Verdicts and intervals, their tuning, and how often they are wrong."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from marl_ray.experiments.designs.adjustment import summarise
from marl_ray.experiments.statistics.intervals import Interval, Summary, Verdict, tune_rho, verdict
from marl_ray.experiments.statistics.sequential import judge_harm, judge_promotion, mean_interval


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
def test_an_interval_gives_its_verdict(low, high, expected):
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
