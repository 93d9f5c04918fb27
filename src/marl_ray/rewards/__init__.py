"""Rewards for code and mathematics that language policies write. Runs without torch and Ray."""

from marl_ray.rewards.code import (
    CallTest,
    CodeReward,
    CodeTask,
    StdioTest,
    Test,
    Tested,
    code_reward,
    reference_cpu,
    run_tests,
)
from marl_ray.rewards.extraction import blocks, defines, extract
from marl_ray.rewards.math import extract_answer, math_reward
from marl_ray.rewards.math_answers import answers_match, number
from marl_ray.rewards.outputs import outputs_match
from marl_ray.rewards.style import style, violations

__all__ = [
    "CallTest",
    "CodeReward",
    "CodeTask",
    "StdioTest",
    "Test",
    "Tested",
    "answers_match",
    "blocks",
    "code_reward",
    "defines",
    "extract",
    "extract_answer",
    "math_reward",
    "number",
    "outputs_match",
    "reference_cpu",
    "run_tests",
    "style",
    "violations",
]
