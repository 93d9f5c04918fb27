"""The sums of a batch over all workers, in one exchange, and the metrics that follow from them."""

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.normalization import moments
from marl_ray.algorithms.losses.aggregation import count_tokens_and_sequences
from marl_ray.training.collectives import sum_each_over_workers
from marl_ray.training.errors import DivergedError
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.training.learner.preparation.estimates import Estimates
from marl_ray.training.learner.prepared_batch import OldOutputs
from marl_ray.training.learner.trained_policy import TrainedPolicy
from marl_ray.trajectories import Trajectories

CHECKED_TENSORS = ("rewards", "costs", "log_probs", "values", "cost_values")
"""Tensors of a batch that must be finite."""


def sum_batch(
    policy: TrainedPolicy,
    batch: Trajectories,
    estimates: Estimates,
    old: OldOutputs,
    divergence: Tensor,
    mask: Tensor,
    left_out: Tensor,
    share: BatchShare,
    minibatch_plan: list[list[Selection]],
) -> dict[str, Tensor]:
    """Add up over all workers what they must agree on.

    These are counts, and moments (count, sum, sum of squares) over `mask`. Every worker takes part. `left_out` (B,)
    bool are the rows that a comparison of groups leaves out.
    """
    raw = estimates.advantages
    targets = torch.zeros_like(raw) if estimates.targets is None else estimates.targets
    sums = {
        "not_finite": torch.stack([(~getattr(batch, name).isfinite()).any() for name in CHECKED_TENSORS]).double(),
        "advantages": moments(raw, mask),
        "targets": moments(targets, mask),
        "residuals": moments(targets - batch.values, mask),
        "divergence": moments(divergence, mask),
        "costs": _signal_moments(estimates.cost_advantages, mask),
        "cost_targets": _signal_moments(estimates.cost_targets, mask),
        "minibatches": torch.stack(
            [
                count_tokens_and_sequences(selection.take(mask, share.agents))
                for epoch in minibatch_plan
                for selection in epoch
            ]
        ),
        "batch": count_tokens_and_sequences(mask),
        "left_out": left_out.sum().double(),
    }
    if policy.settings.has_other_engine:
        sums["engine_gap"] = moments((old.log_probs - batch.log_probs).abs(), mask)
    return sum_each_over_workers(sums)


def check_finite(where: str, sums: dict[str, Tensor]) -> None:
    """Raise DivergedError naming `where` and the tensor if one of CHECKED_TENSORS is not finite on some worker."""
    for name, count in zip(CHECKED_TENSORS, sums["not_finite"].tolist(), strict=True):
        if count:
            raise DivergedError(f"{where}: {name} of the batch are not finite")


def batch_metrics(
    policy: TrainedPolicy, batch: Trajectories, estimates: Estimates, sums: dict[str, Tensor]
) -> dict[str, float]:
    """Return the metrics that are known before the first gradient step, over all workers."""
    metrics: dict[str, float] = {}
    if policy.hyper.kl_coef:
        metrics["reference_kl"] = _mean(sums["divergence"])
    if policy.settings.has_other_engine:
        metrics["engine/log_prob_gap"] = _mean(sums["engine_gap"])
    if policy.algorithm.spec.groups and batch.prompts is not None:
        rows = float(sums["left_out"]) + float(sums["batch"][1])
        metrics["left_out"] = float(sums["left_out"]) / max(rows, 1.0)
    if estimates.targets is not None:
        metrics["explained_variance"] = _explained_variance(sums["targets"], sums["residuals"])
    return metrics


def _signal_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return the moments of every signal of (B, T, K) over own decisions, (K, 3)."""
    signals = values.unbind(-1)
    return torch.stack([moments(signal, mask) for signal in signals]) if signals else mask.new_zeros(0, 3)


def _mean(sums: Tensor) -> float:
    """Return the mean, from moments (count, sum, sum of squares)."""
    return float(sums[1] / sums[0].clamp(min=1))


def _explained_variance(targets: Tensor, residuals: Tensor) -> float:
    """Return 1 - the mean square residual over the variance of the targets; 0 without variance.

    Both are given by their moments (3,).
    """
    n, total, square = targets.tolist()
    variance = square / max(n, 1) - (total / max(n, 1)) ** 2
    residual = float(residuals[2]) / max(n, 1)
    return 1 - residual / variance if variance > 1e-8 else 0.0
