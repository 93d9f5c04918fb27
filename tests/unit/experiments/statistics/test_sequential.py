"""Rollback and promotion tests, betting intervals and sample ratios: what may be looked at at any time."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import AssignmentTable
from marl_ray.experiments.assignment.sample_ratio import CONCENTRATION, sample_ratio, sample_ratio_of_epochs
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.sequential import (
    judge_harm,
    judge_promotion,
    log_e_value,
    one_sided_boundary,
    relative_scale,
    scale_summary,
    standard_error_and_time,
)

RULES: Any = {"alpha": 0.05, "margin": 0.1, "min_outcomes": 50}
ARMS = st.builds(Summary, st.integers(50, 5000), st.floats(-3, 3), st.floats(0.01, 9))


def summary(values: np.ndarray) -> Summary:
    return Summary(len(values), float(values.mean()), float(values.var(ddof=1)))


@pytest.mark.parametrize(("s", "v", "rho"), [(30.0, 100.0, 20.0), (-30.0, 100.0, 20.0), (4.0, 3.0, 50.0), (0.0, 9, 1)])
def test_e_value_is_the_mixture_over_positive_drifts(s, v, rho):
    """exp(lambda s - lambda^2 v / 2) over lambda ~ |N(0, 1/rho)|, integrated numerically."""

    def weighted(drift: float) -> float:
        return math.exp(drift * s - drift**2 * v / 2 - drift**2 * rho / 2) * 2 * math.sqrt(rho / (2 * math.pi))

    mixture, _ = integrate.quad(weighted, 0, 12 / math.sqrt(v + rho) + max(0, s / (v + rho)), epsabs=0, limit=200)
    assert log_e_value(s, v, rho) == pytest.approx(math.log(mixture), abs=1e-6)


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e4), st.floats(1e-6, 0.49))
def test_boundary_is_where_the_e_value_reaches_one_over_alpha(v, rho, alpha):
    s = one_sided_boundary(v, rho, alpha)
    assert log_e_value(s, v, rho) == pytest.approx(-math.log(alpha), abs=1e-6)


def test_e_value_of_a_hopeless_sum_is_tiny_not_an_error():
    assert -20 < log_e_value(-1e6, 100.0, 10.0) < log_e_value(-2000.0, 100.0, 10.0) < -3


@given(ARMS, ARMS, st.floats(0.01, 100), st.floats(-100, 100), st.floats(0, 1))
def test_tests_move_and_scale_with_the_outcomes(treatment, control, scale, shift, margin):
    def moved(arm: Summary) -> Summary:
        return Summary(arm.n, scale * arm.mean + shift, scale**2 * arm.variance)

    for test in (judge_harm, judge_promotion):
        before = test(treatment, control, alpha=0.05, margin=margin, min_outcomes=50)
        after = test(moved(treatment), moved(control), alpha=0.05, margin=scale * margin, min_outcomes=50)
        assert after.bound == pytest.approx(scale * before.bound, abs=1e-8 * scale + 1e-8)
        assert math.log(after.e_value) == pytest.approx(math.log(before.e_value), rel=1e-5, abs=1e-5)


@given(ARMS, ARMS, st.floats(0, 1))
def test_smaller_is_better_is_the_same_on_negated_outcomes(treatment, control, margin):
    for test in (judge_harm, judge_promotion):
        strict = test(treatment, control, alpha=0.05, margin=margin, min_outcomes=50, higher_is_better=False)
        negated = (Summary(arm.n, -arm.mean, arm.variance) for arm in (treatment, control))
        assert strict == test(*negated, alpha=0.05, margin=margin, min_outcomes=50)


@given(ARMS, ARMS, st.floats(0, 1))
def test_verdict_bound_and_evidence_agree_and_never_contradict(treatment, control, margin):
    bad = judge_harm(treatment, control, alpha=0.05, margin=margin, min_outcomes=50)
    good = judge_promotion(treatment, control, alpha=0.05, margin=margin, min_outcomes=50)
    assert good.bound < bad.gain == good.gain < bad.bound
    assert bad.proven == (bad.bound < -margin)
    assert good.proven == (good.bound > -margin)
    for result in (bad, good):
        if abs(math.log(result.e_value * 0.05)) > 1e-6:
            assert result.proven == (result.e_value > 20)
        assert result.p_value == min(1, 1 / result.e_value)
    assert not (bad.proven and good.proven)


def test_nothing_is_decided_early_or_without_a_variance():
    great, poor = Summary(49, 9.0, 1.0), Summary(5000, 0.0, 1.0)
    for arms in ((great, poor), (poor, great)):
        for test in (judge_harm, judge_promotion):
            assert not test(*arms, **RULES).proven
            assert math.isinf(test(*arms, **RULES).bound)
            assert test(*arms, **RULES).e_value == 1
    constant = Summary(500, 1.0, 0.0), Summary(500, 0.0, 0.0)
    assert not judge_promotion(*constant, **RULES).proven
    assert not judge_promotion(Summary(500, 1.0, math.inf), poor, **RULES).proven
    assert math.isnan(judge_harm(Summary(0, math.nan, 0.0), poor, **RULES).gain)
    # One constant arm borrows the other's variance.
    assert judge_harm(Summary(500, -1.0, 0.0), poor, **RULES).proven
    assert judge_harm(Summary(60, -0.2, 0.0), poor, **RULES).proven is False


def test_binary_outcomes_need_no_variance():
    rules: Any = {"alpha": 0.05, "margin": 0.02, "min_outcomes": 50, "binary": True}
    spotless = Summary(600, 1.0, 0.0)
    assert judge_promotion(spotless, Summary(5000, 1.0, 0.0), **rules).proven
    assert not judge_promotion(Summary(50, 1.0, 0.0), Summary(450, 1.0, 0.0), **rules).proven
    assert judge_harm(Summary(200, 0.8, 0.16), Summary(1800, 0.99, 0.0099), **rules).proven
    assert not judge_harm(Summary(50, 0.96, 0.04), Summary(450, 1.0, 0.0), **(rules | {"margin": 0.0})).proven
    errors = [Summary(arm.n, 1 - arm.mean, arm.variance) for arm in (spotless, Summary(5000, 0.99, 0.0099))]
    successes = spotless, Summary(5000, 0.99, 0.0099)
    for test in (judge_harm, judge_promotion):
        general, other = test(*errors, **rules, higher_is_better=False), test(*successes, **rules)
        assert general.e_value == pytest.approx(other.e_value)
    with pytest.raises(MarlRayError, match=r"^binary: expected outcomes 0 or 1, got a mean of 1\.5$"):
        judge_harm(Summary(50, 1.5, 1.0), spotless, **rules)


@pytest.mark.parametrize(
    ("alpha", "margin", "name"),
    [(0.0, 0.0, "alpha"), (0.5, 0.0, "alpha"), (math.nan, 0.0, "alpha"), (0.1, -1, "margin")],
)
def test_alpha_must_leave_doubt_and_margins_room(alpha, margin, name):
    for test in (judge_harm, judge_promotion):
        with pytest.raises(MarlRayError, match=f"{name}: expected"):
            test(Summary(50, 0.0, 1.0), Summary(50, 0.0, 1.0), alpha=alpha, margin=margin, min_outcomes=50)


def test_intrinsic_time_is_information_whatever_the_shares():
    even = standard_error_and_time(Summary(300, 0.0, 2.0), Summary(300, 0.0, 2.0))
    assert even == pytest.approx((math.sqrt(2 * 2 / 300), 600))
    error, v = standard_error_and_time(Summary(100, 0.0, 1.0), Summary(900, 0.0, 1.0))
    assert v == pytest.approx(4 / error**2)
    assert v == pytest.approx(4 * 90)


def test_watched_a_a_runs_err_at_most_alpha_and_real_harm_is_found():
    rng, wrong, detected = np.random.default_rng(1), {judge_harm: 0, judge_promotion: 0}, 0
    for _ in range(200):
        control, treatment = rng.standard_t(3, 800), rng.standard_t(3, 800)
        looks = [(summary(treatment[:n]), summary(control[:n])) for n in range(50, 801, 25)]
        wrong[judge_harm] += any(judge_harm(*look, alpha=0.05, margin=0, min_outcomes=50).proven for look in looks)
        at_margin = [(Summary(t.n, t.mean - 0.1, t.variance), c) for t, c in looks]
        wrong[judge_promotion] += any(judge_promotion(*look, **RULES).proven for look in at_margin)
        harmed = [(Summary(t.n, t.mean - 1, t.variance), c) for t, c in looks]
        detected += any(judge_harm(*look, **RULES).proven for look in harmed)
    assert max(wrong.values()) <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05)
    assert detected > 195


@given(st.lists(st.floats(0, 9), min_size=60, max_size=90), st.lists(st.floats(0, 9), min_size=60, max_size=90))
def test_a_relative_margin_is_the_test_of_the_scaled_control(treatment, control):
    """The variance is of the contrast "treatment - 0.9 control", not of the plain difference."""
    treated, other = summary(np.array(treatment)), summary(np.array(control))
    for higher, k in ((True, 0.9), (False, 1.1)):
        assert relative_scale(0.1, higher) == pytest.approx(k)
        for test in (judge_harm, judge_promotion):
            rules: Any = {"alpha": 0.05, "margin": 0.0, "min_outcomes": 50, "higher_is_better": higher}
            result, expected = (
                test(treated, scale_summary(other, k), **rules),
                test(treated, summary(k * np.array(control)), **rules),
            )
            assert result.gain == pytest.approx(expected.gain, abs=1e-9)
            assert result.bound == pytest.approx(expected.bound, abs=1e-6) or math.isinf(expected.bound)


@given(st.integers(50, 3000), st.integers(50, 3000), st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 2))
def test_scaled_events_have_the_variance_of_scaled_events(n, m, p, q, k):
    """In units where the control's event is 1 and the treatment's 1 / k, nothing is another."""
    treatment, control = Summary(n, p, 0.0), Summary(m, k * q, 0.0)
    for test in (judge_harm, judge_promotion):
        rules: Any = {"alpha": 0.05, "min_outcomes": 50, "binary": True}
        result = test(treatment, control, margin=0.0, scale=k, **rules)
        assert math.isfinite(result.e_value) and result.gain == pytest.approx(p - k * q)
        if k == 1:
            assert result == test(treatment, control, margin=0.0, **rules)
    rare = Summary(4000, 0.004, 0.0), Summary(4000, 1.1 * 0.02, 0.0)
    result = judge_promotion(
        *rare, alpha=0.05, margin=0.0, min_outcomes=50, binary=True, scale=1.1, higher_is_better=False
    )
    assert result.proven


def test_relative_margins_err_at_most_alpha_where_the_loss_is_just_the_margin():
    rng, wrong = np.random.default_rng(5), {judge_harm: 0, judge_promotion: 0}
    for _ in range(200):
        control, treatment = rng.gamma(2, 2, 800), 0.9 * rng.gamma(2, 2, 800)
        looks = [(summary(treatment[:n]), scale_summary(summary(control[:n]), 0.9)) for n in range(50, 801, 25)]
        for test in (judge_harm, judge_promotion):
            wrong[test] += any(test(*look, alpha=0.05, margin=0.0, min_outcomes=50).proven for look in looks)
    assert max(wrong.values()) <= 14, wrong  # 10, and one deviation


SHARES = st.lists(st.floats(0.05, 5), min_size=2, max_size=4).map(lambda w: dict(zip("abcd", w, strict=False)))


@settings(max_examples=50)
@given(SHARES, st.lists(st.integers(0, 3), max_size=60))
def test_sample_ratio_is_the_product_of_polya_predictions(shares, draws):
    """The mixture's likelihood, unit by unit: an urn that starts as the shares and gains each unit's arm."""
    names, total = list(shares), sum(shares.values())
    counts, expected = dict.fromkeys(names, 0), 0.0
    for n, draw in enumerate(draws):
        arm = names[draw % len(names)]
        share = shares[arm] / total
        expected += math.log((CONCENTRATION * share + counts[arm]) / (CONCENTRATION + n) / share)
        counts[arm] += 1
    result = sample_ratio(counts, shares)
    assert result.log_e == pytest.approx(expected, abs=1e-8)
    turned = sample_ratio(dict(reversed(counts.items())), {arm: 3 * share for arm, share in shares.items()})
    assert turned.log_e == pytest.approx(result.log_e, abs=1e-8)
    assert result.p_value == pytest.approx(min(1, math.exp(-result.log_e)))


def test_the_assignment_table_keeps_the_sample_ratio_and_losses_raise_the_alarm():
    weights = {"control": 0.7, "first": 0.2, "second": 0.1}
    table, counts = AssignmentTable(weights, "salt", 1), dict.fromkeys(weights, 0)
    for k in range(200_000):
        counts[table.assign(f"session-{k}").arm] += 1
        if k % 1000 == 999:
            assert not sample_ratio(counts, weights).alarm
    assert sample_ratio(counts, {"control": 0.68, "first": 0.2, "second": 0.12}).alarm
    lossy = counts | {"first": round(counts["first"] * 0.95)}
    assert sample_ratio(lossy, weights).alarm
    # A fixed-count test of the same agrees.
    assert stats.chisquare(list(lossy.values()), [sum(lossy.values()) * w for w in weights.values()]).pvalue < 1e-6


def test_sample_ratio_over_epochs_and_impossible_units():
    first, second = ({"a": 900, "b": 100}, {"a": 0.9, "b": 0.1}), ({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5})
    together = sample_ratio_of_epochs([first, second])
    assert together.log_e == pytest.approx(sample_ratio(*first).log_e + sample_ratio(*second).log_e)
    assert not together.alarm
    merged = {"a": 1400, "b": 600}
    assert sample_ratio(merged, {"a": 0.9, "b": 0.1}).alarm  # which is why epochs stay apart
    for shares in ({"a": 1.0, "b": 0.0}, {"a": 1.0}):
        assert sample_ratio({"a": 10, "b": 1}, shares) == (math.inf, 0.0, True)
    assert sample_ratio({}, {"a": 1.0, "b": 1.0}).p_value == 1
    with pytest.raises(
        MarlRayError, match=r"^shares: expected finite numbers, not negative and not all zero, got \{'a': 0\.0\}$"
    ):
        sample_ratio({"a": 1}, {"a": 0.0})
    with pytest.raises(MarlRayError, match=r"^counts: expected no negative number, got \{'a': -1\}$"):
        sample_ratio({"a": -1}, {"a": 1.0})
