"""The t-test of a size fixed beforehand, its power and the sizes it needs, against scipy and simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.errors import MarlRayError
from marl_ray.experiments.designs.adjustment import summarise
from marl_ray.experiments.designs.fixed_size import power_of_test, samples_needed, welch
from marl_ray.experiments.statistics.intervals import Summary

ARMS = st.builds(Summary, st.integers(2, 500), st.floats(-3, 3), st.floats(0.01, 9))


@pytest.mark.parametrize(("n", "m"), [(2, 3), (20, 200), (500, 40)])
def test_welch_is_scipys(n, m):
    rng = np.random.default_rng(n)
    treatment, control = rng.normal(1.2, 3, n), rng.normal(1, 1, m)
    interval, oracle = (
        welch(summarise(treatment), summarise(control), 0.1),
        stats.ttest_ind(treatment, control, equal_var=False),
    )
    bounds = oracle.confidence_interval(0.9)
    assert (interval.p_value, interval.dof) == pytest.approx((oracle.pvalue, oracle.df))
    assert (interval.difference.low, interval.difference.high) == pytest.approx((bounds.low, bounds.high))
    assert interval.percent.estimate == pytest.approx(100 * (treatment.mean() - control.mean()) / control.mean())


@given(ARMS, ARMS, st.floats(0.01, 100))
def test_welch_scales_and_swaps(treatment, control, scale):
    def scaled(arm: Summary) -> Summary:
        return Summary(arm.n, scale * arm.mean, scale**2 * arm.variance)

    result, other = welch(treatment, control, 0.05), welch(scaled(treatment), scaled(control), 0.05)
    assert other.p_value == pytest.approx(result.p_value, rel=1e-6)
    assert other.difference.high == pytest.approx(scale * result.difference.high, rel=1e-6, abs=1e-9)
    swapped = welch(control, treatment, 0.05)
    assert swapped.p_value == pytest.approx(result.p_value)
    assert swapped.difference.low == pytest.approx(-result.difference.high)


def test_percent_change_covers_the_true_one():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        treatment, control = rng.normal(6, 2, 80), rng.normal(5, 2, 120)
        percent = welch(summarise(treatment), summarise(control), 0.1).percent
        covered += percent.low < 20 < percent.high
    assert abs(covered / 400 - 0.9) < 3 * math.sqrt(0.09 / 400)
    assert math.isnan(welch(Summary(9, 1.0, 1.0), Summary(9, 0.0, 1.0), 0.1).percent.estimate)


def test_welch_knows_nothing_from_too_little():
    for arm in (Summary(0, math.nan, 0.0), Summary(1, 3.0, 0.0)):
        test = welch(arm, Summary(50, 1.0, 1.0), 0.05)
        assert (test.p_value, test.difference.high) == (1, math.inf)
    assert welch(Summary(9, 1.0, 0.0), Summary(9, 0.0, 0.0), 0.05).p_value == 1


def test_power_is_the_textbooks_and_the_simulations():
    # Cohen's table for two groups, alpha 0.05 two-sided, power 0.8.
    assert [samples_needed(effect=d, sd=1)[0] for d in (0.2, 0.5, 0.8)] == [394, 64, 26]
    rng = np.random.default_rng(0)
    p = stats.ttest_ind(rng.normal(0.5, 1, (20_000, 40)), rng.normal(0, 1, (20_000, 30)), axis=1).pvalue
    assert power_of_test(40, 30, effect=0.5, sd=1, alpha=0.05) == pytest.approx((p < 0.05).mean(), abs=0.011)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 3.0])
def test_samples_needed_are_the_fewest_that_have_the_power(ratio):
    treatment, control = samples_needed(effect=-2, sd=6, alpha=0.01, power=0.9, ratio=ratio)
    assert treatment == math.ceil(ratio * control)
    assert power_of_test(treatment, control, effect=-2, sd=6, alpha=0.01) >= 0.9
    fewer = math.ceil(ratio * (control - 1))
    assert power_of_test(fewer, control - 1, effect=-2, sd=6, alpha=0.01) < 0.9
    with pytest.raises(
        MarlRayError, match=r"^effect: expected finite sd, ratio > 0, effect not 0, and 0 < alpha < power < 1$"
    ):
        samples_needed(effect=0, sd=1)
