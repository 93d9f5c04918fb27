"""Shape rewards before advantages.

A divergence from the reference is subtracted, and a penalty for length.
"""

import torch
from torch import Tensor

from marl_ray.config import HyperParameters
from marl_ray.trajectories import Trajectories


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return DAPO's penalty of overlong sequences, (B,): eq. 13 of arXiv 2503.14476.

    The penalty is 0 up to `max_length - buffer` decisions, then falls linearly to -factor at `max_length` and stays
    there.
    """
    over = (lengths - (max_length - buffer)).clamp(0, buffer)
    return -factor * over / buffer if buffer else torch.zeros_like(lengths, dtype=torch.float32)


def shaped_rewards(batch: Trajectories, hyper: HyperParameters, horizon: int, divergence: Tensor | None) -> Tensor:
    """Subtract the divergence (B, T) and the penalty for too long sequences from the rewards, and return (B, T)."""
    rewards = batch.rewards
    if divergence is not None:
        rewards = rewards - divergence * batch.mask
    if hyper.overlong_buffer:
        lengths = batch.mask.sum(1)
        penalty = overlong_penalty(lengths, horizon, hyper.overlong_buffer, hyper.overlong_penalty)
        last = (batch.mask.cumsum(1) == lengths[:, None]) & batch.mask
        rewards = rewards + torch.where(last, penalty[:, None], 0.0)
    return rewards
