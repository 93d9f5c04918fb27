"""The decisions that a batch is trained on, and their advantages.

There are advantages of the rewards, and of each cost signal.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.batch_gae import cost_advantages
from marl_ray.algorithms.advantages.groups import comparable_rows
from marl_ray.algorithms.advantages.normalization import standardize
from marl_ray.config import HyperParameters
from marl_ray.errors import MarlRayError
from marl_ray.training.learner.trained_policy import TrainedPolicy
from marl_ray.trajectories import Trajectories


class Estimates(NamedTuple):
    """Advantages and the critics' targets as the algorithm estimates them, before any normalisation."""

    advantages: Tensor
    """(B, T), in units of the reward."""
    targets: Tensor | None
    """(B, T), in units of the reward; None where the gradient steps train no critic."""
    cost_advantages: Tensor
    """(B, T, K), in units of each cost signal; K is 0 without constraints."""
    cost_targets: Tensor
    """(B, T, K), likewise."""


def trained_decisions(batch: Trajectories, hyper: HyperParameters) -> Tensor:
    """Return the decisions that are trained on, (B, T) bool.

    The decisions are the policy's own, without greedy rows and, with `overlong_filter`, without truncated rows.
    """
    mask = batch.mask & ~batch.greedy[:, None]
    if hyper.overlong_filter:
        mask = mask & ~batch.truncated.any(1, keepdim=True)
    return mask


def split_rows(policy: TrainedPolicy, batch: Trajectories) -> tuple[Tensor, Tensor]:
    """Return the decisions that are trained on, and the rows that a comparison of groups leaves out.

    The decisions are (B, T) bool, the rows (B,) bool.
    """
    spec, mask = policy.algorithm.spec, trained_decisions(batch, policy.hyper)
    left_out = torch.zeros_like(batch.greedy)
    if spec.groups:  # an answer to a prompt that nobody else answered has nothing to be compared with
        left_out = mask.any(1) & ~comparable_rows(batch, spec.greedy)
        mask = mask & ~left_out[:, None]
    return mask, left_out


def estimate_advantages(policy: TrainedPolicy, batch: Trajectories) -> Estimates:
    """Turn the batch's rewards and costs into advantages and targets.

    The algorithm estimates those of the rewards; those of the costs are GAE's. Raises MarlRayError if the algorithm
    gives advantages or targets of another shape than (B, T).
    """
    advantages, targets = _estimate_checked(policy, batch)
    no_costs = batch.costs.new_zeros(*batch.mask.shape, 0)
    costs = cost_advantages(batch, policy.hyper) if policy.budgets else (no_costs, no_costs)
    return Estimates(advantages, targets, *costs)


def _estimate_checked(policy: TrainedPolicy, batch: Trajectories) -> tuple[Tensor, Tensor | None]:
    algorithm, spec, expected = policy.algorithm, policy.algorithm.spec, batch.mask.shape
    advantages, targets = algorithm.advantages(batch, policy.hyper)
    if spec.critic_first:
        targets = None  # the critic was fitted to its own targets already
    checked = {"advantages": advantages, **({} if spec.critic == "none" or spec.critic_first else {"targets": targets})}
    for key, value in checked.items():
        if value is None or value.shape != expected:
            raise MarlRayError(
                f"algorithm {algorithm.name}: its `advantages` gives {key} of shape "
                f"{None if value is None else tuple(value.shape)}, expected {tuple(expected)}"
            )
    return advantages, targets


def center_costs(raw: Tensor, mask: Tensor, all_moments: Tensor, scale: bool) -> tuple[Tensor, Tensor]:
    """Centre cost advantages (B, T, K) and, with `scale`, divide them by each signal's standard deviation.

    `all_moments` (K, 3) are over all workers. Without `scale` the advantages keep their units, which are the budgets'.
    Returns the advantages and the divisors (K,), which are 1 without `scale`.
    """
    if not raw.shape[-1]:
        return raw, raw.new_zeros(0)
    columns, divisors = [], []
    for column, sums in zip(raw.unbind(-1), all_moments, strict=True):
        n, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
        deviation = (sums[2] / n - mean**2).clamp(min=0).sqrt()
        divisor = deviation if scale and float(deviation) > 1e-8 else torch.ones_like(deviation)
        columns.append(standardize(column, mask, sums, center=True, scale=False) / divisor.to(column.dtype))
        divisors.append(divisor)
    return torch.stack(columns, -1), torch.stack(divisors).float()
