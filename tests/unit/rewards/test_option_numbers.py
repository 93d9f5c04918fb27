"""Weights, prices and tolerances that a user sets are finite: an infinite weight of a part that is 0 would pay NaN."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from pydantic import ValidationError

from marl_ray.deadlines.seconds import DAY_S
from marl_ray.envs.text.code_team import CodeTeam
from marl_ray.envs.text.math_tasks import MathTasks
from marl_ray.rewards.answers import MathAnswer
from marl_ray.rewards.code import CodeRewardConfig, CodeTests
from marl_ray.rewards.judge.reward import LLMJudge
from marl_ray.rewards.option_numbers import check_finite, check_not_negative
from marl_ray.sandbox.limits import MAX_MEMORY_BYTES, MIN_MEMORY_BYTES

OPTIONS = [
    (CodeTests, "correctness", {}),
    (CodeTests, "style", {}),
    (CodeTests, "efficiency", {}),
    (MathAnswer, "tolerance", {}),
    (MathTasks, "tolerance", {"count": 2}),
    (CodeTeam, "shaping", {"count": 2}),
    (LLMJudge, "input_price", {"offline": True, "output_price": 1.0}),
    (LLMJudge, "output_price", {"offline": True, "input_price": 1.0}),
]


def line(message: str) -> str:
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize("value", [0, -0.0, 1, 1e308, np.float32(0.5), Fraction(1, 2)])
def test_finite_numbers_of_0_or_more_pass_both_checks(value):
    check_finite("weight", value)
    check_not_negative("weight", value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.float32("inf"), 10**400, True, "1", None])
def test_what_is_no_finite_number_passes_neither(value):
    with pytest.raises(ValueError, match=line(f"weight={value!r}, expected a finite number")):
        check_finite("weight", value)
    with pytest.raises(ValueError, match=line(f"weight={value!r}, expected a finite number, 0 or more")):
        check_not_negative("weight", value)


@pytest.mark.parametrize(("make", "option", "others"), OPTIONS)
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_a_reward_refuses_a_number_that_could_pay_nan(make, option, others, value):
    with pytest.raises(ValueError, match=line(f"{option}={value!r}, expected a finite number, 0 or more")):
        make(**others, **{option: value})


@pytest.mark.parametrize(
    ("make", "option", "others"), [(CodeTeam, "review_weight", {"count": 2}), (LLMJudge, "fallback", {"offline": True})]
)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_may_be_negative_is_finite_too(make, option, others, value):
    with pytest.raises(ValueError, match=line(f"{option}={value!r}, expected a finite number")):
        make(**others, **{option: value})
    make(**others, **{option: -0.5})


@pytest.mark.parametrize("option", ["retries", "concurrency", "max_failures"])
@pytest.mark.parametrize("value", [-1, 1.5, math.inf, math.nan])
def test_the_counts_of_a_judge_are_whole_numbers(option, value):
    least = 0 if option == "retries" else 1
    with pytest.raises(ValueError, match=line(f"{option}={value!r}, expected a whole number of at least {least}")):
        LLMJudge(offline=True, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", DAY_S),
        ("timeout_s", math.inf),
        ("memory_bytes", MIN_MEMORY_BYTES - 1),
        ("memory_bytes", MAX_MEMORY_BYTES + 1),
        ("correctness", math.inf),
        ("style", math.nan),
        ("shaping", -1),
    ],
)
def test_the_config_of_a_reward_for_code_has_the_same_ranges(option, value):
    with pytest.raises(ValidationError, match=option):
        CodeRewardConfig(**{option: value})


def test_the_ends_of_the_ranges_are_in_the_config_of_a_reward_for_code():
    for memory_bytes in (MIN_MEMORY_BYTES, MAX_MEMORY_BYTES):
        assert CodeRewardConfig(memory_bytes=memory_bytes, timeout_s=DAY_S - 1).memory_bytes == memory_bytes
