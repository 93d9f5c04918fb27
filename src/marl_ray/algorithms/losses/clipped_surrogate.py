"""The policy loss of proximal policy optimisation, per decision."""

from torch import Tensor

from marl_ray.algorithms.definition import PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.config import HyperParameters


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """Return -min(rho A, clip(rho, low, high) A), and a bool that is True where the clip removed the gradient.

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with a bound for each side (arXiv 2503.14476, eq. 8). The dual clip
    (Ye et al. 2020, arXiv 1912.09729, eq. 5) bounds the loss of a bad action (A < 0) by -dual_clip A.
    """
    free, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    objective, clipped = free.minimum(bounded), bounded < free
    if dual_clip is not None:
        floor = dual_clip * advantages
        below_floor = (advantages < 0) & (objective < floor)
        objective, clipped = objective.where(~below_floor, floor), clipped | below_floor
    return PolicyLoss(-objective, clipped)


def ppo_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the clipped surrogate with a ratio per decision."""
    ratio = token_ratio(batch.log_probs, batch.old_log_probs)
    return clipped_surrogate(ratio, batch.advantages, *hyper.clip_range, hyper.dual_clip)
