"""Config of the rewards for code."""

from pydantic import Field

from marl_ray.config.base import Config
from marl_ray.deadlines.seconds import DAY_S


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
    timeout_s: float = Field(default=3.0, gt=0, lt=DAY_S)
    """CPU seconds of one test, less than a day."""
    memory_bytes: int = Field(default=1 << 30, ge=1 << 26, le=1 << 48)
    """Address space of the program that is tested, from 64 MiB to 256 TiB."""
