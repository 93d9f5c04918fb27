"""Rewards for the answers of language policies: code, mathematics, judges. Runs without torch and Ray."""

from marl_ray.rewards.code import (
    CallTest,
    CodeReward,
    CodeRewardConfig,
    CodeTask,
    CodeTestResults,
    StdioTest,
    Test,
    code_reward,
    reference_cpu,
    run_tests,
)
from marl_ray.rewards.extraction import defines, extract, python_blocks
from marl_ray.rewards.math_answers import answers_match, number
from marl_ray.rewards.math_reward import extract_answer, math_reward
from marl_ray.rewards.outputs import outputs_match
from marl_ray.rewards.style import count_violations, style

__all__ = [
    "CallTest",
    "CodeReward",
    "CodeRewardConfig",
    "CodeTask",
    "CodeTestResults",
    "StdioTest",
    "Test",
    "answers_match",
    "code_reward",
    "count_violations",
    "defines",
    "extract",
    "extract_answer",
    "math_reward",
    "number",
    "outputs_match",
    "python_blocks",
    "reference_cpu",
    "run_tests",
    "style",
]
