"""Sums of rewards along a sequence: algorithms without a critic learn from them."""

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.gae import gae


def reward_to_go(rewards: Tensor, mask: Tensor, is_last: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each own step to its episode's end, (B, T).

    The sum is 0 where `mask` is False.

        R_t = r_t + gamma R_{t+1}

    over own steps only (REINFORCE++, arXiv 2501.03262): steps that are not own neither discount nor restart the sum,
    and their rewards go to the latest own step before them. So with gamma = 1 a terminal reward reaches every own token
    of the episode, across tool output. `rewards` are (B, T); `mask` and `is_last` (B, T) bool, the latter True at the
    last step of every episode that ends within the row. Rewards before an episode's first own step follow from none of
    its decisions and are dropped.
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, zeros, mask, is_last, torch.zeros_like(is_last), gamma, 1.0)[1]


def sequence_scores(rewards: Tensor) -> Tensor:
    """Return the undiscounted sum of each sequence's rewards, (B,), of `rewards` (B, T)."""
    return rewards.sum(1)
