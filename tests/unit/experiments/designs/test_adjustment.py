"""CUPED, ratios and Holm's adjustment, against oracles and plain loops."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.experiments.designs.adjustment import adjust_holm, cuped, ratio_summary, summarise


def test_cuped_is_least_squares_with_a_mean_per_arm():
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(5, 2, 300), "b": rng.normal(5, 2, 200), "empty": np.zeros(0)}
    y = {"a": 3 * x["a"] + rng.normal(0, 2, 300), "b": 1 + 3 * x["b"] + rng.normal(0, 2, 200), "empty": np.zeros(0)}
    result = cuped(y, x)
    design = np.zeros((500, 3))
    design[:300, 0] = design[300:, 1] = 1
    design[:, 2] = np.concatenate([x["a"], x["b"]])
    intercept_a, intercept_b, slope = np.linalg.lstsq(design, np.concatenate([y["a"], y["b"]]), rcond=None)[0]
    assert result.theta == pytest.approx(slope)
    assert result.arms["b"].mean - result.arms["a"].mean == pytest.approx(intercept_b - intercept_a)
    assert result.arms["empty"].n == 0
    correlation = np.corrcoef(x["a"], y["a"])[0, 1]
    assert result.arms["a"].variance == pytest.approx((1 - correlation**2) * y["a"].var(ddof=1), rel=0.02)
    moved = cuped(y, {arm: 7 + 2 * values for arm, values in x.items()})
    assert moved.arms["a"].mean == pytest.approx(result.arms["a"].mean)
    constant = cuped(y, {arm: np.ones(len(values)) for arm, values in y.items()})
    assert constant.arms["a"] == summarise(y["a"])
    with pytest.raises(MarlRayError, match=r"^covariates: expected 200 numbers for arm 'b', as many as outcomes$"):
        cuped(y, {"a": x["a"]})


def test_ratio_varies_as_the_bootstrap_says():
    rng = np.random.default_rng(0)
    steps = rng.poisson(20, 500) + 1.0
    errors = rng.binomial(steps.astype(int), rng.beta(2, 18, 500)).astype(float)
    summary = ratio_summary(errors, steps)
    assert summary.mean == pytest.approx(errors.sum() / steps.sum())
    draws = rng.integers(0, 500, (4000, 500))
    bootstrap = (errors[draws].sum(1) / steps[draws].sum(1)).std()
    assert math.sqrt(summary.variance / summary.n) == pytest.approx(bootstrap, rel=0.05)
    plain, same = ratio_summary(errors, np.ones(500)), summarise(errors)
    assert (plain.mean, plain.variance) == pytest.approx((same.mean, same.variance))
    with pytest.raises(MarlRayError, match=r"^denominators: expected a positive sum, got 0\.0$"):
        ratio_summary(np.ones(2), np.zeros(2))
    assert ratio_summary(np.zeros(0), np.zeros(0)).n == 0


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=6))
def test_holm_is_the_closure_of_bonferroni(p_values):
    """A hypothesis is refuted if every set of hypotheses that holds it is refuted by Bonferroni's test."""
    adjusted = adjust_holm(p_values)
    assert list(adjusted) == list(p_values)
    for name in p_values:
        sets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(p_values, size) if name in s]
        assert adjusted[name] == pytest.approx(max(min(1, len(s) * min(p_values[k] for k in s)) for s in sets))
