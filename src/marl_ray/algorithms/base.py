"""The interface of an algorithm: its spec, and the functions that the learner calls on a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from marl_ray.algorithms.advantages.shaping import shaped_rewards
from marl_ray.algorithms.constraints.multipliers import Multiplier
from marl_ray.algorithms.losses.value_losses import Valued, ppo_value_loss
from marl_ray.config import AlgorithmConfig, Spec
from marl_ray.errors import MarlRayError
from marl_ray.trajectories import Trajectories


class Evaluated(NamedTuple):
    """Decisions of R sequences at T steps, evaluated by the current weights and as they were when gathered; (R, T) each."""

    log_probs: Tensor
    """Log-probabilities under the current policy, with gradients."""
    old_log_probs: Tensor
    """Log-probabilities under the policy that the update began with."""
    advantages: Tensor
    """Normalised, combined with costs, weighted; detached."""
    mask: Tensor
    """bool: decisions that are trained on."""
    behaviour_log_probs: Tensor
    """Log-probabilities under the policy that sampled, as recorded; equal to `old_log_probs` unless `Spec.recompute`,
    `importance_cap` or bfloat16 has the learner evaluate those itself."""
    values: Tensor
    """The critic's estimates when the decisions were made, in reward units; 0 without a critic."""
    reference_log_probs: Tensor | None = None
    """Log-probabilities under the reference policy; None where `kl_coef` is 0."""


class PolicyLoss(NamedTuple):
    """Per decision, (R, T) each; the learner weighs and adds them (see `aggregation`)."""

    loss: Tensor
    clipped: Tensor
    """bool: the clip took the gradient away."""


AdvantageEstimator = Callable[[Trajectories, AlgorithmConfig], tuple[Tensor, Tensor | None]]
"""Advantages (B, T) in reward units, not normalised over the batch, and the critic's targets (B, T) if there is one."""


@dataclass(frozen=True)
class Algorithm:
    """One named algorithm. Every function is pure and takes the policy's `hyper`; rows may be any part of a batch but for
    those that take Trajectories, which see all rows of this worker."""

    name: str
    spec: Spec
    advantages: AdvantageEstimator
    policy_loss: Callable[[Evaluated, AlgorithmConfig], PolicyLoss]
    value_loss: Callable[[Valued, AlgorithmConfig], Tensor] = ppo_value_loss
    """(R, T) loss of the critic, and of each cost critic."""
    critic_targets: Callable[[Trajectories, AlgorithmConfig], Tensor] | None = None
    """Targets (B, T) that the critic is fitted to before the advantages, for `Spec.critic_first`. Such a critic's outputs
    are in units of its own: `values` of the batch are its outputs after the fit."""
    shape_rewards: Callable[[Trajectories, AlgorithmConfig, int, Tensor | None], Tensor] = shaped_rewards
    """(B, T) rewards that advantages are taken of, from the batch, the greatest length of a sequence and, where
    `kl_place` is `reward`, the divergence (B, T) from the reference times its coefficient."""
    multiplier: Callable[[AlgorithmConfig, float], Multiplier] | None = None
    """Make the first multiplier of a constraint from `hyper` and the constraint's budget, for `constraint: multiplier`."""
    rescale: bool = True
    """Divide the combined advantage by 1 + sum of the multipliers."""
    every_step: bool = False
    """Move the multipliers after every gradient step, and not once per batch."""

    def __post_init__(self) -> None:
        given = {
            "critic_targets": (self.critic_targets is not None, self.spec.critic_first),
            "multiplier": (self.multiplier is not None, self.spec.constraint == "multiplier"),
        }
        for key, (there, needed) in given.items():
            if there != needed:
                raise MarlRayError(f"algorithm {self.name}: its spec asks for {'a' if needed else 'no'} `{key}`")
