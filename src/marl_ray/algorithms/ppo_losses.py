"""The two losses of proximal policy optimisation, per decision."""

from torch import Tensor
from torch.nn import functional

from marl_ray.algorithms.base import Evaluated, Losses
from marl_ray.config import AlgorithmConfig


def clipped_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, 1-clip, 1+clip) A) and whether the clip removed the gradient, (N,) each.

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7. The log ratio is clamped to +-20 so that exp cannot overflow.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    free, bounded = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return -free.minimum(bounded), bounded < free


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None, huber_delta: float
) -> Tensor:
    """max of the Huber losses of the new value and of the new value held within +-clip of the old one, (N,).

    Yu et al. 2021 (arXiv 2103.01955), appendix C. All inputs in units of the value normaliser.
    """
    loss = functional.huber_loss(values, returns, reduction="none", delta=huber_delta)
    if clip is None:
        return loss
    held = old_values + (values - old_values).clamp(-clip, clip)
    return loss.maximum(functional.huber_loss(held, returns, reduction="none", delta=huber_delta))


def ppo_losses(batch: Evaluated, hyper: AlgorithmConfig) -> Losses:
    """Both losses with the diagnostics that go with them."""
    policy, clipped = clipped_surrogate(batch.log_probs, batch.old_log_probs, batch.advantages, hyper.clip)
    value = clipped_value_loss(batch.values, batch.old_values, batch.returns, hyper.value_clip, hyper.huber_delta)
    log_ratio = (batch.log_probs - batch.old_log_probs).detach().clamp(-20, 20)
    return Losses(policy, value, log_ratio.exp() - 1 - log_ratio, clipped.float())
