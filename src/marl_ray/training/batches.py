"""What is fixed for all epochs on a batch: targets, advantages, old log-probabilities, encoded inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marl_ray.algorithms.dapo import overlong_penalty
from marl_ray.algorithms.normalization import moments, standardise
from marl_ray.algorithms.value_norm import ValueNorm
from marl_ray.config import AlgorithmConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic import ActorCritic, Prepared
from marl_ray.training.collectives import total
from marl_ray.trajectories import Trajectories


class Diverged(MarlRayError):
    """A number that is not finite: training again from the same checkpoint would meet it again."""


@dataclass(frozen=True)
class CostStats:
    """What the episodes that ended in this batch cost."""

    means: tuple[float, ...] | None
    """Mean cost of an episode by signal; None while no episode has ended."""
    episodes: int
    """How many ended in this batch, on all workers."""


@dataclass(frozen=True)
class Fixed:
    """A batch ready for its epochs; (B, T) unless said otherwise, on the learner's device."""

    batch: Trajectories
    mask: Tensor
    """bool: decisions that are trained on."""
    actor: Prepared
    critic: Prepared | None
    advantages: Tensor
    cost_advantages: Tensor
    """(B, T, K)."""
    returns: Tensor | None
    """In units of the value normaliser, as `old_values`; None without a critic."""
    cost_returns: Tensor | None
    """(B, T, K), in units of each signal's normaliser, as `old_cost_values`."""
    old_values: Tensor
    old_cost_values: Tensor
    old_log_probs: Tensor
    importance: Tensor | None
    """Weight of each decision's loss, for experience of another policy."""
    reference: Tensor | None
    """Log-probabilities under the reference policy."""


def check_finite(where: str, batch: Trajectories) -> None:
    """Raise Diverged on every worker if some worker's experience is not finite; names the tensor."""
    tensors = {name: getattr(batch, name) for name in ("rewards", "costs", "log_probs", "values", "cost_values")}
    bad = total(torch.stack([(~tensor.isfinite()).any().float() for tensor in tensors.values()]))
    for name, found in zip(tensors, bad.tolist(), strict=True):
        if found:
            raise Diverged(f"{where}: {name} of the batch are not finite")


def trained_decisions(batch: Trajectories, hyper: AlgorithmConfig) -> Tensor:
    """(B, T) bool: own decisions, without greedy rows and, if asked, without rows that were cut."""
    mask = batch.mask & ~batch.greedy[:, None]
    if hyper.overlong_filter:
        mask = mask & ~batch.truncated.any(1, keepdim=True)
    return mask


def shaped_rewards(batch: Trajectories, hyper: AlgorithmConfig, horizon: int, divergence: Tensor | None) -> Tensor:
    """(B, T) rewards with the divergence from the reference and the penalty for too long sequences taken off."""
    rewards = batch.rewards
    if divergence is not None:
        rewards = rewards - divergence * batch.mask
    if hyper.overlong_buffer:
        lengths = batch.mask.sum(1)
        penalty = overlong_penalty(lengths, horizon, hyper.overlong_buffer, hyper.overlong_penalty)
        last = (batch.mask.cumsum(1) == lengths[:, None]) & batch.mask
        rewards = rewards + torch.where(last, penalty[:, None], 0.0)
    return rewards


def normalised_advantages(raw: Tensor, mask: Tensor, hyper: AlgorithmConfig) -> Tensor:
    """Advantages as the loss takes them: over all workers' decisions centred and scaled, or as they are."""
    if hyper.advantage_norm != "batch":
        return raw * mask
    return standardise(raw, mask, total(moments(raw, mask)), hyper.std_ddof, hyper.std_eps)


def centred_costs(raw: Tensor, mask: Tensor, scale: bool) -> tuple[Tensor, Tensor]:
    """Cost advantages (B, T, K) centred, with `scale` divided by each signal's spread; and the divisors, (K,).

    Without `scale` they keep their units, as a budget has them.
    """
    columns, divisors = [], []
    for column in raw.unbind(-1):
        found = total(moments(column, mask))
        n, mean = found[0].clamp(min=1), found[1] / found[0].clamp(min=1)
        deviation = (found[2] / n - mean**2).clamp(min=0).sqrt()
        divisor = deviation if scale and float(deviation) > 1e-8 else torch.ones_like(deviation)
        columns.append(standardise(column, mask, found, center=True, scale=False) / divisor.to(column.dtype))
        divisors.append(divisor)
    return torch.stack(columns, -1), torch.stack(divisors).float()


def updated_norms(
    norms: Sequence[ValueNorm], targets: Tensor, mask: Tensor
) -> tuple[tuple[ValueNorm, ...], list[dict[str, float]]]:
    """Normalisers with this batch's targets (B, T, K), one each, and the targets' moments."""
    after, described = [], []
    for norm, column in zip(norms, targets.unbind(-1), strict=True):
        n, summed, squares = total(moments(column, mask)).tolist()
        mean, square = summed / max(n, 1), squares / max(n, 1)
        after.append(norm.updated(mean, square))
        described.append({"mean": mean, "square": square})
    return tuple(after), described


def normalised(norms: Sequence[ValueNorm], values: Tensor) -> Tensor:
    """(B, T, K) in units of each signal's normaliser."""
    return torch.stack([norm.normalize(column) for norm, column in zip(norms, values.unbind(-1), strict=True)], -1)


def prepared_inputs(model: ActorCritic, batch: Trajectories) -> tuple[Prepared, Prepared | None]:
    """Encoded inputs of actor and critics."""
    actor = Prepared.of(model.actor, batch.observations.flatten(0, 1))
    if not model.critics:
        return actor, None
    if not model.central:
        # Both networks of a local critic read the same rows, whose encoding depends on no weights.
        return actor, actor
    assert batch.states is not None
    return actor, Prepared.of(model.critics[0], batch.states.flatten(0, 1))


def with_values(batch: Trajectories, values: Tensor) -> Trajectories:
    """The batch with other values (B, T) at its steps."""
    return replace(batch, values=values)
