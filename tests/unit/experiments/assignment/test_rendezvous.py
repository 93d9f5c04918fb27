"""The arm of each unit: shares, movements when weights change, and independence of salts and layers."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.experiments.assignment.rendezvous import (
    AssignmentTable,
    arm_prefix,
    is_in_layer,
    staged_weights,
    uniform_of_key,
)

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
    with pytest.raises(ValueError, match=r"^share must be in \[0, 1\], got 1\.1$"):
        staged_weights({"a": 1.0, "b": 1.0}, "a", 1.1)


@given(st.text(max_size=9), st.text(max_size=9), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_disjoint_shares_of_a_layer_have_no_unit_in_common_and_miss_none(layer, unit, points):
    edges = [0.0, *sorted(points), 1.0]
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
