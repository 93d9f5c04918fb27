"""Seconds that a user sets: more than none and less than a day, in every part that takes them."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from marl_ray.agents.builtin.code_interpreter import CodeInterpreter
from marl_ray.deadlines.seconds import DAY_S, are_seconds, check_seconds
from marl_ray.envs.text.code_team import CodeTeam
from marl_ray.envs.text.react import React
from marl_ray.envs.web.browsergym.environment import BrowserGym
from marl_ray.envs.web.options import BrowserOptions
from marl_ray.rewards.code import CodeTests

PARTS: dict[str, tuple[str, Callable[..., object]]] = {
    "code_tests": ("timeout_s", CodeTests),
    "code_interpreter": ("timeout_s", CodeInterpreter),
    "code_team": ("timeout_s", lambda **options: CodeTeam(count=2, **options)),
    "react": ("timeout_s", React),
    "an action in a browser": ("step_s", BrowserOptions),
    "an episode in a browser": ("episode_s", BrowserOptions),
    "an action in BrowserGym": ("step_s", lambda **options: BrowserGym("browsergym/x.y", **options)),
    "an episode in BrowserGym": ("episode_s", lambda **options: BrowserGym("browsergym/x.y", **options)),
}


def refusal(option: str, value: object) -> str:
    return f"^{re.escape(f'{option}={value!r}, expected seconds, more than 0 and less than a day (86,400)')}$"


@pytest.mark.parametrize("value", [5e-324, 1, 3.5, np.float32(2), np.int64(7), math.nextafter(DAY_S, 0)])
def test_numbers_between_0_and_a_day_are_seconds(value):
    assert are_seconds(value)
    check_seconds("timeout_s", value)


@pytest.mark.parametrize("value", [0, -1.0, DAY_S, 1e12, 10**400, math.inf, -math.inf, math.nan, True, "3", None, 1j])
def test_anything_else_is_refused_by_name(value):
    assert not are_seconds(value)
    with pytest.raises(ValueError, match=refusal("step_s", value)):
        check_seconds("step_s", value)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [0, DAY_S, 1e12, math.inf, math.nan, "3"])
def test_every_part_that_takes_seconds_refuses_the_same_in_the_same_words(part, value):
    option, make = PARTS[part]
    with pytest.raises(ValueError, match=refusal(option, value)):
        make(**{option: value})
