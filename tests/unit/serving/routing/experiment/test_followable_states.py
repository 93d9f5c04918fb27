"""A replica follows of a state what its own config has arms for."""

from dataclasses import replace

import pytest

from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.serving.routing.experiment.followable_states import followable_state, unknown_arms

ARMS = {"one": None, "four": None, "six": None}.keys()
PRESENT = AssignmentState(
    experiment="exp",
    epoch=3,
    status=ExperimentStatus.RUNNING,
    stage=0,
    weights={"one": 0.5, "four": 0.25, "six": 0.25},
    control="one",
    salt="salt",
    shadows=("four", "six"),
    rolled_back=frozenset(),
    on_rollback="cut",
    layer=None,
    layer_share=(0.0, 1.0),
    endpoint="exp",
    randomize="session",
    block_s=600.0,
    created=0.0,
)


def changed(**fields) -> AssignmentState:
    return replace(PRESENT, epoch=4, **fields)


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        ({}, set()),
        ({"weights": {"one": 1.0, "two": 0.5}}, {"two"}),
        ({"weights": {"one": 1.0, "two": 0.0}}, set()),
        ({"weights": {"one": 1.0, "two": 0.0}, "control": "two"}, {"two"}),
    ],
)
def test_an_arm_is_unknown_if_it_has_weight_or_is_the_control_and_the_config_lacks_it(fields, unknown):
    assert unknown_arms(ARMS, changed(**fields)) == unknown


def test_a_state_whose_arms_the_config_has_is_followed_whole():
    state = changed(weights={"one": 1.0, "two": 0.0}, rolled_back=frozenset({"two"}))
    assert followable_state(ARMS, PRESENT, state) is state


def test_of_a_state_with_an_unknown_arm_nothing_is_followed_but_rollbacks():
    unknown = {"weights": {"one": 0.1, "four": 0.1, "six": 0.1, "two": 0.7}}
    assert followable_state(ARMS, PRESENT, changed(**unknown)) is PRESENT
    state = changed(**unknown, rolled_back=frozenset({"four", "seven"}))
    assert followable_state(ARMS, PRESENT, state) == changed(
        weights={"one": 0.75, "four": 0.0, "six": 0.25}, shadows=("six",), rolled_back=frozenset({"four"})
    )


def test_the_present_control_is_not_rolled_back_for_a_state_with_another_control():
    state = changed(weights={"two": 1.0}, control="two", rolled_back=frozenset({"one"}))
    assert followable_state(ARMS, PRESENT, state) is PRESENT
