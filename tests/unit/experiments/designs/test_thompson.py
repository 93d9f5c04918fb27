"""Thompson sampling's chances and weights, against closed forms and simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.errors import MarlRayError
from marl_ray.experiments.designs.thompson import probability_best, thompson_weights
from marl_ray.experiments.statistics.intervals import Summary

ARMS = st.builds(Summary, st.integers(2, 500), st.floats(-3, 3), st.floats(0.01, 9))


@given(ARMS, ARMS)
def test_two_arms_chances_have_a_closed_form(first, other):
    chances = probability_best({"one": first, "other": other})
    total = first.n + other.n
    pooled = (first.n * first.mean + other.n * other.mean) / total
    means = [(arm.n * arm.mean + pooled) / (arm.n + 1) for arm in (first, other)]
    error = math.sqrt(sum(arm.variance / (arm.n + 1) for arm in (first, other)))
    assert chances["one"] == pytest.approx(stats.norm.cdf((means[0] - means[1]) / error), abs=1e-4)
    assert chances["one"] + chances["other"] == pytest.approx(1)


def test_chances_of_many_arms_are_the_simulations_whatever_their_order():
    arms = {
        "a": Summary(400, 1.0, 4.0),
        "b": Summary(20_000, 1.05, 0.01),
        "c": Summary(30, 1.2, 1.0),
        "d": Summary(0, math.nan, 0.0),
    }
    chances, rng, n = probability_best(arms), np.random.default_rng(0), 400_000
    total = sum(arm.n for arm in arms.values())
    pooled = sum(arm.n * arm.mean for arm in arms.values() if arm.n) / total
    squares = sum((arm.n - 1) * arm.variance + arm.n * (arm.mean - pooled) ** 2 for arm in arms.values() if arm.n)
    draws = []
    for arm in arms.values():
        mean = (arm.n * arm.mean + pooled) / (arm.n + 1) if arm.n else pooled
        draws.append(rng.normal(mean, math.sqrt((arm.variance or squares / (total - 1)) / (arm.n + 1)), n))
    best = np.argmax(draws, axis=0)
    assert list(chances.values()) == pytest.approx([(best == k).mean() for k in range(4)], abs=0.004)
    turned = probability_best(dict(reversed(arms.items())))
    assert [turned[arm] for arm in arms] == pytest.approx(list(chances.values()))
    negated = {name: Summary(arm.n, -arm.mean, arm.variance) for name, arm in arms.items()}
    assert list(probability_best(negated, higher_is_better=False).values()) == pytest.approx(list(chances.values()))


@given(st.dictionaries(st.text(max_size=2), ARMS, min_size=1, max_size=5), st.floats(0, 1))
def test_weights_sum_to_one_above_the_floor(arms, share):
    floor = share / len(arms)
    weights = thompson_weights(arms, floor)
    assert math.fsum(weights.values()) == pytest.approx(1)
    assert min(weights.values()) >= floor - 1e-12


def test_weights_without_evidence_are_even():
    nothing = Summary(0, math.nan, 0.0)
    assert thompson_weights({"a": nothing, "b": nothing}, 0.1) == {"a": 0.5, "b": 0.5}
    assert thompson_weights({"a": Summary(5, 1.0, 0.0), "b": Summary(9, 1.0, 0.0)}, 0.1)["a"] == 0.5
    clear = thompson_weights({"a": Summary(500, 1.0, 1.0), "b": Summary(500, 0.0, 1.0)}, 0.05)
    assert clear["a"] == pytest.approx(0.95)
    with pytest.raises(MarlRayError, match=r"^floor: expected 0 to 1/2, the number of arms, got 0\.6$"):
        thompson_weights({"a": nothing, "b": nothing}, 0.6)
    with pytest.raises(MarlRayError, match=r"^arms: expected at least one$"):
        probability_best({})
