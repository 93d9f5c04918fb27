"""Losses of critics, per decision."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from marl_ray.config import HyperParameters


class ValueLossInputs(NamedTuple):
    """A critic's outputs and targets for R sequences at T steps, (R, T) each, in the critic's own units."""

    outputs: Tensor
    """The outputs of the current weights, with gradients."""
    old: Tensor
    """The outputs when the update began."""
    targets: Tensor
    """The returns that the critic is fitted to."""


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None, huber_delta: float
) -> Tensor:
    """Return max of the Huber losses of the new value and of the new value held within +-clip of the old one.

    Yu et al. 2021 (arXiv 2103.01955), appendix C. `returns` are in units of the value normaliser as it is now.
    `old_values` are the critic's outputs before the first step. In the first step `values` equal them, so the clip
    takes nothing away.
    """
    loss = functional.huber_loss(values, returns, reduction="none", delta=huber_delta)
    if clip is None:
        return loss
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return loss.maximum(functional.huber_loss(clipped, returns, reduction="none", delta=huber_delta))


def ppo_value_loss(batch: ValueLossInputs, hyper: HyperParameters) -> Tensor:
    """Return the clipped Huber loss; the critic's units are those of its normaliser."""
    return clipped_value_loss(*batch, hyper.value_clip, hyper.huber_delta)
