"""The one line about what pydantic refused: its key, what the key holds, what was expected, and how many more there are."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from marl_ray.config.base import Config
from marl_ray.config.mistakes.wording import first_mistake, message_of


class Cat(Config):
    kind: Literal["cat"]
    lives: int = 9


class Dog(Config):
    kind: Literal["dog"]
    tail: float


class Farm(Config):
    name: str
    animals: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []
    area: int | list[float] = 1


def mistake_in(data, **options):
    with pytest.raises(ValidationError) as caught:
        Farm.model_validate(data)
    return first_mistake(caught.value, data, **options)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "missing key 'name'"),
        (3, "expected a mapping of keys, got 3"),
        ({"name": None}, "name: expected text, got nothing"),
        ({"name": "f", "animals": [{"kind": "dog"}]}, "missing key 'animals.0.tail'"),
        (
            {"name": "f", "animals": [{"kind": "cat", "lives": "x"}]},
            "animals.0.lives: expected a whole number, got 'x'",
        ),
        ({"name": "f", "area": "x" * 99}, "area: expected a whole number (and 1 more)"),
        ({"nmae": "f"}, "unknown key 'nmae'; did you mean name or animals or area? (and 1 more: name)"),
        (
            {"name": "f", "animals": [{"kind": "cat", "lifes": 1}]},
            "unknown key 'animals.0.lifes'; did you mean animals.0.lives?",
        ),
    ],
)
def test_a_mistake_is_one_line_in_the_words_of_this_product(data, line):
    assert mistake_in(data, model=Farm) == line


def test_values_that_may_be_secrets_are_not_shown():
    assert mistake_in({"name": ["hunter2"]}, shows_values=False) == "name: expected text"


def test_a_text_that_is_not_json_is_called_so():
    with pytest.raises(ValidationError) as caught:
        Farm.model_validate_json("{'name': 1}")
    assert first_mistake(caught.value) == "not JSON: key must be a string at line 1 column 2"


def test_a_mistake_without_its_data_keeps_every_step_to_its_place():
    with pytest.raises(ValidationError) as caught:
        Farm.model_validate_json('{"name": "f", "animals": [{"kind": "dog", "tail": "x"}]}')
    assert first_mistake(caught.value) == "animals.0.dog.tail: expected a number, got 'x'"


def test_the_message_alone_says_missing_and_unknown_keys_too():
    class Strict(BaseModel, extra="forbid"):
        a: int

    with pytest.raises(ValidationError) as caught:
        Strict.model_validate({"b": 1})
    assert [message_of(error) for error in caught.value.errors()] == ["missing key", "unknown key"]
