"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

The rows may hold several episodes. The recursion runs along each row. On a CPU a compiled loop over the rows takes a
third of the time of vector operations step by step; a GPU needs the vector operations. Tests compare both with the same
reference.
"""

import numba
import numpy as np
import torch
from torch import Tensor

MAX_ELEMENTS = 32_768
"""Maximum number of elements of an operation of `gae_by_step`. It is torch's GRAIN_SIZE, up to which an operation starts no
threads, which would wait for the other processes of a busy machine; the elements also stay in a processor's cache."""


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
    """Return the advantages and returns of generalised advantage estimation, (B, T) each, without gradient.

    A return is advantage + value; both are 0 where `mask` is False.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    At a boundary (the last step of an episode or of the row) V_{t+1} is 0 after a termination and `bootstrap`
    otherwise, and no later advantage flows back. Steps with mask False are skipped: the next own
    step's value and advantage are carried over them without discount, and their rewards (a tool's answer, another
    agent's turn) are added to that of the latest own step before them in the episode, so that nothing an own step led
    to is lost. Rewards before an episode's first own step are dropped. Inputs are (B, T) in reward units, `mask`,
    `terminated` and `truncated` bool. `rewards`, `values` and `bootstrap` may be (B, T, K) for K signals (costs), each
    estimated by itself; then the results are (B, T, K) too. `rewards` must be finite everywhere, `values` at own steps,
    `bootstrap` at boundaries.
    """
    estimate = gae_by_row if rewards.device.type == "cpu" else gae_by_step
    return estimate(rewards, values, bootstrap, mask, terminated, truncated, gamma, lam)


def gae_by_row(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Return `gae` of CPU tensors, row by row."""
    signals = [x.detach() if x.dim() == 3 else x.detach()[..., None] for x in (rewards, values, bootstrap)]
    flags = [x.contiguous().numpy() for x in (mask, terminated, truncated)]
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    advantages, returns = (torch.empty(signals[0].shape, dtype=dtype) for _ in range(2))
    arrays = [x.contiguous().numpy() for x in signals]
    _estimate_rows(*arrays, *flags, gamma, lam, advantages.numpy(), returns.numpy())
    return advantages.reshape(rewards.shape), returns.reshape(rewards.shape)


@numba.njit(cache=True, nogil=True)
def _estimate_rows(
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap: np.ndarray,
    mask: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    lam: float,
    advantages: np.ndarray,
    returns: np.ndarray,
) -> None:
    """Compute the advantages and returns of every row and signal in place, with sums in float64.

    The return G = A + V obeys G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}).
    """
    rows, steps, signals = rewards.shape
    for b in range(rows):
        for k in range(signals):
            carried = 0.0  # the sum that a step passes to the one before it in the episode
            for t in range(steps - 1, -1, -1):
                total = float(rewards[b, t, k])
                if not terminated[b, t]:
                    is_boundary = truncated[b, t] or t == steps - 1
                    total += gamma * bootstrap[b, t, k] if is_boundary else carried
                if mask[b, t]:
                    advantages[b, t, k], returns[b, t, k] = total - values[b, t, k], total
                    carried = gamma * ((1 - lam) * values[b, t, k] + lam * total)
                else:
                    advantages[b, t, k] = returns[b, t, k] = 0.0
                    carried = total


def gae_by_step(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Return `gae` by vector operations over all rows, step by step, on any device."""
    with torch.no_grad():
        reward, value, next_value = _to_time_first(rewards), _to_time_first(values), _to_time_first(bootstrap)
        decision, terminal, boundary = _to_time_first(mask), _to_time_first(terminated), _to_time_first(truncated)
        boundary[-1:] = True
        if rewards.dim() == 3:
            decision, terminal, boundary = (x.repeat(1, rewards.shape[2]) for x in (decision, terminal, boundary))
        _scan(reward, value, next_value, decision, terminal, boundary, gamma, lam)
        return _to_batch_first(value, rewards.shape), _to_batch_first(reward, rewards.shape)


def _to_time_first(x: Tensor) -> Tensor:
    """Copy (B, T) to (T, B), or (B, T, K) to (T, K B), also where the transpose is already contiguous."""
    turned = x.detach().flatten(1).t().clone(memory_format=torch.contiguous_format)
    return turned.view(x.shape[1], x.shape[2:].numel() * len(x))


def _to_batch_first(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_to_time_first`: back to (B, T) or (B, T, K)."""
    return x.view(shape[1:].numel(), shape[0]).t().contiguous().view(shape)


def _scan(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    decision: Tensor,
    terminal: Tensor,
    boundary: Tensor,
    gamma: float,
    lam: float,
) -> None:
    """Turn `reward` into returns and `value` into advantages, in place; all (T, N), and `next_value` is read at boundaries.

    Each step of the scan takes two operations.
    """
    steps, width = reward.shape
    length = max(1, MAX_ELEMENTS // max(1, width))
    carried = reward.new_zeros(width)  # the sum that a step passes to the one before it in the episode
    for start in reversed(range(0, steps, length)):
        block = slice(start, start + length)
        returns, values, decisions, ends = reward[block], value[block], decision[block], terminal[block]
        returns += torch.where(boundary[block] & ~ends, gamma * next_value[block], 0.0)
        continues, is_own = (~(boundary[block] | ends)).to(returns.dtype), decisions.to(returns.dtype)
        from_value = torch.where(decisions, (gamma - gamma * lam) * values, 0.0)
        factor = (1 - is_own).add_(is_own, alpha=gamma * lam)
        for rows in zip(*(reversed(x.unbind(0)) for x in (returns, continues, from_value, factor)), strict=True):
            total, keep, constant, scale = rows
            total.addcmul_(keep, carried)
            carried = torch.addcmul(constant, scale, total)
        values.copy_(torch.where(decisions, returns - values, 0.0))
        returns.copy_(torch.where(decisions, returns, 0.0))
