"""Rewards for the answers of language policies: code, mathematics, judges. Runs without torch and Ray."""

from marl_ray.rewards.code import (
    CallTest,
    CodeReward,
    CodeTask,
    CodeTestResults,
    StdioTest,
    Test,
    code_reward,
    reference_cpu,
    run_tests,
)
from marl_ray.rewards.extraction import blocks, defines, extract
from marl_ray.rewards.math_answers import answers_match, number
from marl_ray.rewards.math_reward import extract_answer, math_reward
from marl_ray.rewards.outputs import outputs_match
from marl_ray.rewards.style import style, violations

__all__ = [
    "CallTest",
    "CodeReward",
    "CodeTask",
    "CodeTestResults",
    "StdioTest",
    "Test",
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
