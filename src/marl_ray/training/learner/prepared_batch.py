"""What is fixed for all epochs on a batch: targets, advantages, old log-probabilities, encoded inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.normalization import moments, standardise
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import AlgorithmConfig
from marl_ray.errors import MarlRayError
from marl_ray.trajectories import Trajectories


class Diverged(MarlRayError):
    """A number that is not finite: training again from the same checkpoint would meet it again."""


@dataclass(frozen=True)
class CostStats:
    """What the episodes that ended in this batch cost."""

    means: tuple[float, ...] | None
    """Mean cost of an episode by signal; None while no episode has ended."""
    episodes: int
    """How many ended in this batch, on all workers; 0 where `means` are those of earlier ones."""
    decisions: float = 1.0
    """Of the learner's policy in one of these episodes, all its agents together, on average."""


@dataclass(frozen=True)
class Fixed:
    """A batch ready for its epochs; (B, T) unless said otherwise, on the learner's device."""

    batch: Trajectories
    mask: Tensor
    """bool: decisions that are trained on."""
    inputs: Any
    """What the family's `evaluate` takes."""
    order: Tensor | None
    """(B,) rows with like numbers cost less in one pass; None where all passes cost the same."""
    advantages: Tensor
    cost_advantages: Tensor
    """(B, T, K)."""
    returns: Tensor | None
    """In units of the value normaliser; None without a critic."""
    cost_returns: Tensor | None
    """(B, T, K), in units of each signal's normaliser."""
    old_values: Tensor
    """What the critic puts out before the first step, in its own units: where the value clip takes nothing away."""
    old_cost_values: Tensor
    """The same of the cost critic, (B, T, K)."""
    old_log_probs: Tensor
    recomputed: bool
    """Old log-probabilities and values are of the learner's own arithmetic: in the first gradient step they are what that
    step computes, so that its ratios are exactly 1."""
    importance: Tensor | None
    """Weight of each decision's loss, for experience of another policy."""
    reference: Tensor | None
    """Log-probabilities under the reference policy; None where nothing is measured from it."""
    sizes: Tensor
    """(minibatches of all epochs, 2) decisions and sequences of each over all workers."""
    sequences: int
    """Rows with a trained decision, over all workers."""

    @property
    def behaviour_log_probs(self) -> Tensor:
        """Of the policy that sampled."""
        return self.batch.log_probs


CHECKED = ("rewards", "costs", "log_probs", "values", "cost_values")
"""Tensors of a batch that must be finite."""


def not_finite(batch: Trajectories) -> Tensor:
    """1 for each of CHECKED that holds a NaN or an infinity, (5,)."""
    return torch.stack([(~getattr(batch, name).isfinite()).any() for name in CHECKED]).double()


def check_finite(where: str, found: Tensor) -> None:
    """Raise Diverged naming the tensor if `not_finite`, summed over the workers, found one."""
    for name, bad in zip(CHECKED, found.tolist(), strict=True):
        if bad:
            raise Diverged(f"{where}: {name} of the batch are not finite")


def trained_decisions(batch: Trajectories, hyper: AlgorithmConfig) -> Tensor:
    """(B, T) bool: own decisions, without greedy rows and, if asked, without rows that were cut."""
    mask = batch.mask & ~batch.greedy[:, None]
    if hyper.overlong_filter:
        mask = mask & ~batch.truncated.any(1, keepdim=True)
    return mask


def signal_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Moments of every signal of (B, T, K) over own decisions, (K, 3)."""
    return (
        torch.stack([moments(column, mask) for column in values.unbind(-1)])
        if values.shape[-1]
        else mask.new_zeros(0, 3)
    )


def centred_costs(raw: Tensor, mask: Tensor, found: Tensor, scale: bool) -> tuple[Tensor, Tensor]:
    """Cost advantages (B, T, K) centred, with `scale` divided by each signal's spread; and the divisors, (K,).

    `found` are their moments over all workers, (K, 3). Without `scale` they keep their units, as a budget has them.
    """
    columns, divisors = [], []
    for column, sums in zip(raw.unbind(-1), found, strict=True):
        n, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
        deviation = (sums[2] / n - mean**2).clamp(min=0).sqrt()
        divisor = deviation if scale and float(deviation) > 1e-8 else torch.ones_like(deviation)
        columns.append(standardise(column, mask, sums, center=True, scale=False) / divisor.to(column.dtype))
        divisors.append(divisor)
    return torch.stack(columns, -1), torch.stack(divisors).float()


def updated_norms(norms: Sequence[ValueNorm], found: Tensor) -> tuple[ValueNorm, ...]:
    """Normalisers with one more batch's targets, whose moments over all workers are `found`, (K, 3). A batch without
    decisions moves none."""
    pairs = zip(norms, found.tolist(), strict=True)
    return tuple(norm.updated(total / n, square / n) if n else norm for norm, (n, total, square) in pairs)


def normalised(norms: Sequence[ValueNorm], values: Tensor) -> Tensor:
    """(B, T, K) in units of each signal's normaliser."""
    return torch.stack([norm.normalize(column) for norm, column in zip(norms, values.unbind(-1), strict=True)], -1)
