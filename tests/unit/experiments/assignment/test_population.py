"""Populations: shares, layers and hold-outs are met and independent, and what cannot be one is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.config import ExperimentConfig, GatewayConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.population import population_of
from marl_ray.experiments.assignment.rendezvous import AssignmentTable, is_held_out_unit, is_in_layer, is_in_share
from marl_ray.experiments.store.records import assignment_part

UNITS = [f"u{k}" for k in range(5_000)]
VALUES = st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3)


def population(**fields: Any) -> Any:
    return population_of({"population": fields})


def test_shares_are_met_and_independent_of_layers_hold_outs_arms_and_other_salts():
    table = AssignmentTable({"a": 1.0, "b": 1.0}, "exp", 1)
    halves = {
        "share": [is_in_share("exp", 0.5, unit) for unit in UNITS],
        "other salt": [is_in_share("other", 0.5, unit) for unit in UNITS],
        "layer": [is_in_layer("exp", (0.0, 0.5), unit) for unit in UNITS],
        "hold-out": [is_held_out_unit("exp", 0.5, unit) for unit in UNITS],
        "other hold-out": [is_held_out_unit("other", 0.5, unit) for unit in UNITS],
        "arm": [table.assign(unit).arm == "a" for unit in UNITS],
    }
    for half, units in halves.items():
        assert stats.binomtest(sum(units), len(UNITS), 0.5).pvalue > 1e-4, half
        for other, other_units in halves.items():
            if half < other:
                both = sum(map(lambda x, y: x and y, units, other_units))
                assert stats.binomtest(both, len(UNITS), 0.25).pvalue > 1e-4, (half, other)
    for share in (0.001, 0.03, 0.9):
        for taken in (is_in_share, is_held_out_unit):
            count = sum(taken("exp", share, unit) for unit in UNITS)
            assert stats.binomtest(count, len(UNITS), share).pvalue > 1e-4


@given(st.text(max_size=5), st.text(max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_larger_shares_only_add_units(name, unit, smaller, other):
    low, high = sorted((smaller, other))
    for taken in (is_in_share, is_held_out_unit):
        assert taken(name, low, unit) <= taken(name, high, unit)
        assert not taken(name, 0.0, unit) and taken(name, 1.0, unit)


def test_places_are_fixed_for_good():
    """Another value would mix the populations of running experiments."""
    assert [is_in_share("exp", 0.5, f"u{i}") for i in range(8)] == IN_SHARE
    assert [is_held_out_unit("exp", 0.5, f"u{i}") for i in range(8)] == HELD_OUT


IN_SHARE = [True, False, False, False, False, True, True, True]
HELD_OUT = [False, True, False, False, True, False, True, False]


@given(
    st.dictionaries(st.sampled_from("xyz"), st.lists(VALUES, min_size=1, max_size=3)),
    st.dictionaries(st.sampled_from("xyz"), VALUES),
)
def test_a_unit_takes_part_that_has_a_wanted_value_of_every_name(accepted, attributes):
    def same(first: Any, other: Any) -> bool:
        return first == other and isinstance(first, bool) == isinstance(other, bool)

    expected = all(
        name in attributes and any(same(attributes[name], value) for value in values)
        for name, values in accepted.items()
    )
    population_config = population(attributes=accepted)
    assert population_config.includes("s", "u", attributes) is expected and population_config.may_include("s", "u")
    again = {name: values[::-1] + values for name, values in reversed(accepted.items())}
    assert population(attributes=again) == population_config


def test_another_population_is_another_epoch():
    config = {"salt": "s", "arms": {"a": {"digest": "d", "weight": 1.0}}}
    parts = [
        assignment_part(config | {"population": fields})
        for fields in ({}, {"share": 1.0, "attributes": {}}, {"share": 0.5}, {"attributes": {"x": [1]}})
    ]
    assert parts[0] == assignment_part(config) == parts[1]
    assert parts[2] != parts[0] != parts[3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": 0}, "population.share"),
        ({"share": 1.5}, "population.share"),
        ({"attributes": {"x": []}}, "attributes.x: expected at least one value"),
        ({"attributes": {"x": [None]}}, "expected a boolean, a number, or a text of 1 to 256 printable characters"),
        ({"attributes": {"x": [float("inf")]}}, "expected a boolean, a number"),
        ({"attributes": {"x": [""]}}, "expected a boolean, a number"),
        ({"attributes": {"x\n": [1]}}, "expected printable names"),
        ({"attributes": {"x": "de"}}, "population.attributes.x"),
    ],
)
def test_bad_populations_are_named_in_one_line(fields, message):
    with pytest.raises(MarlRayError) as caught:
        parse_config(ExperimentConfig, {"name": "e", "arms": {"a": {"bundle": "b"}}, "population": fields})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_values_keep_their_types():
    fields = {"attributes": {"x": [True, 1, 1.5, "1"]}}
    config = parse_config(ExperimentConfig, {"name": "e", "arms": {"a": {"bundle": "b"}}, "population": fields})
    stored = config.model_dump(mode="json")
    assert list(map(repr, stored["population"]["attributes"]["x"])) == ["True", "1", "1.5", "'1'"]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_hold_out_is_a_share_below_one(share):
    with pytest.raises(MarlRayError, match=r"holdouts\.game"):
        parse_config(GatewayConfig, {"holdouts": {"game": share}})
