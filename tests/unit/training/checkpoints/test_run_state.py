"""The file of a run's state: what is written is read again."""

import json
from dataclasses import fields

import pytest

from marl_ray.training.checkpoints.run_state import RunState, StateFile
from marl_ray.training.costs import CostStats

STATE = RunState(
    costs={"lm": CostStats((1.5,), 2, 3.0)},
    mlflow_run_id=None,
    layouts={"lm": {"critic": "none"}},
    play_facts={"seed": 1},
)


def test_the_keys_of_the_file_are_the_fields_of_the_state():
    plain = json.loads(StateFile(STATE, {"lm": {}}, {"lm/step": 4.0}).encode())
    assert plain.keys() == {field.name for field in fields(RunState)} | {"learners", "scalars"}
    assert (plain["layouts"], plain["play_facts"]) == ({"lm": {"critic": "none"}}, {"seed": 1})


def test_a_state_is_read_as_it_was_written():
    written = StateFile(STATE, {"lm": {}}, {"lm/step": 4.0})
    assert StateFile.decode(written.encode()) == written


@pytest.mark.parametrize("content", ["null", "[]", "3"])
def test_a_file_of_another_value_is_refused(content):
    with pytest.raises(TypeError, match=r"^expected an object, got "):
        StateFile.decode(content.encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [("learners", []), ("scalars", None), ("costs", []), ("costs", {"lm": 3})],
)
def test_a_part_of_another_type_is_refused(key, value):
    plain = json.loads(StateFile(STATE, {"lm": {}}, {"lm/step": 4.0}).encode())
    with pytest.raises(TypeError, match=r"^expected an object, got "):
        StateFile.decode(json.dumps(plain | {key: value}).encode())
