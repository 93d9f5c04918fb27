"""Config of the rewards for code."""

from pydantic import Field

from marl_ray.config.base import Config


class CodeRewardConfig(Config):
    """Weights of the parts of a reward for code, and the limits of its tests."""

    correctness: float = Field(default=1.0, ge=0)
    """Weight of the fraction of hidden tests that pass."""
    style: float = Field(default=0.0, ge=0)
    """Weight of 1 / (1 + ruff violations). Counts only where all hidden tests pass."""
    efficiency: float = Field(default=0.0, ge=0)
    """Weight of the reference's CPU time over the program's, at most 1. Counts only where all hidden tests pass."""
    shaping: float = Field(default=0.0, ge=0)
    """Weight of the change in the fraction of public tests that pass, from one turn to the next."""
    timeout_s: float = Field(default=3.0, gt=0)
    """CPU time of one test."""
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Address space of the program that is tested."""
