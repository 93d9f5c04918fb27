"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) on rows that hold several episodes."""

import torch
from torch import Tensor

BLOCK = 32_768
"""Elements worked on at a time: few enough to stay in the cache and to not start threads, which wait on a busy machine."""


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
    """Advantages and returns (advantage + value), (B, T) each; both 0 where `mask` is False, without gradient.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    Where a row is cut (an episode's end, or the row's last step) V_{t+1} is `bootstrap` after a truncation or at the
    row's end, 0 after a termination, and no later advantage flows back. Steps with mask False are skipped: the next own
    step's value and advantage are carried over them without discount, and their rewards (a tool's answer, another
    agent's turn) are added to that of the latest own step before them in the episode, so that nothing an own step led to
    is lost. Rewards before an episode's first own step are dropped. Inputs are (B, T) in reward units, `mask`,
    `terminated` and `truncated` bool. `rewards`, `values` and `bootstrap` may be (B, T, K) for K signals (costs), each
    estimated by itself; so are the results. `rewards` must be finite everywhere, `values` at own steps, `bootstrap` at
    cuts.
    """
    with torch.no_grad():
        reward, value, after_cut = _time_first(rewards), _time_first(values), _time_first(bootstrap)
        own, ended, cut = _time_first(mask), _time_first(terminated), _time_first(truncated)
        cut[-1:] = True
        if rewards.dim() == 3:
            own, ended, cut = (x.repeat(1, rewards.shape[2]) for x in (own, ended, cut))
        _scan(reward, value, after_cut, own, ended, cut, gamma, lam)
        return _batch_first(value, rewards.shape), _batch_first(reward, rewards.shape)


def _time_first(x: Tensor) -> Tensor:
    """A (T, B) copy of (B, T), or a (T, K B) copy of (B, T, K); a copy also where the transpose is already contiguous."""
    turned = x.detach().flatten(1).t().clone(memory_format=torch.contiguous_format)
    return turned.view(x.shape[1], x.shape[2:].numel() * len(x))


def _batch_first(x: Tensor, shape: torch.Size) -> Tensor:
    """Back to (B, T) or (B, T, K)."""
    return x.view(shape[1:].numel(), shape[0]).t().contiguous().view(shape)


def _scan(
    reward: Tensor, value: Tensor, bootstrap: Tensor, own: Tensor, ended: Tensor, cut: Tensor, gamma: float, lam: float
) -> None:
    """Turn `reward` into returns and `value` into advantages, in place; all (T, N).

    The return G = A + V obeys G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}): a linear scan, two operations a step.
    """
    steps, width = reward.shape
    length = max(1, BLOCK // max(1, width))
    flowing = reward.new_zeros(width)  # what a step adds to the reward of the one before it in the episode
    for start in reversed(range(0, steps, length)):
        r, v, b, o, e, c = (x[start : start + length] for x in (reward, value, bootstrap, own, ended, cut))
        r += torch.where(c & ~e, gamma * b, 0.0)
        inside, is_own = (~(c | e)).to(r.dtype), o.to(r.dtype)
        from_value = torch.where(o, (gamma - gamma * lam) * v, 0.0)
        factor = (1 - is_own).add_(is_own, alpha=gamma * lam)
        for rows in zip(*(reversed(x.unbind(0)) for x in (r, inside, from_value, factor)), strict=True):
            total, keep, constant, scale = rows
            total.addcmul_(keep, flowing)
            flowing = torch.addcmul(constant, scale, total)
        v.copy_(torch.where(o, r - v, 0.0))
        r.copy_(torch.where(o, r, 0.0))
