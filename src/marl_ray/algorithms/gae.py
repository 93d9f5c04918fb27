"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) on rows that hold several episodes."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (advantage + value), (B, T) each; both 0 where `mask` is False.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    Where a row is cut (an episode's end, or the row's last step) V_{t+1} is `bootstrap` after a truncation or at the
    row's end, 0 after a termination, and no later advantage flows back. Steps with mask False are skipped: the next own
    step's value and advantage are carried over them. Inputs are (B, T) in reward units, `mask`, `terminated` and
    `truncated` bool.
    """
    batch, steps = rewards.shape
    own, cut = mask.unbind(1), (terminated | truncated).unbind(1)
    after = torch.where(terminated, 0.0, bootstrap).unbind(1)
    reward, value = rewards.unbind(1), values.unbind(1)
    advantage, next_value = rewards.new_zeros(batch), after[-1]
    columns: list[Tensor] = []
    for t in reversed(range(steps)):
        next_value = torch.where(cut[t], after[t], next_value)
        carried = torch.where(cut[t], 0.0, advantage)
        current = reward[t] + gamma * next_value - value[t] + gamma * lam * carried
        columns.append(torch.where(own[t], current, 0.0))
        advantage = torch.where(own[t], current, carried)
        next_value = torch.where(own[t], value[t], next_value)
    advantages = torch.stack(columns[::-1], 1)
    return advantages, torch.where(mask, advantages + values, 0.0)
