"""The parts of a named algorithm: its spec, and the functions that the learner calls on a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from marl_ray.algorithms.advantages.shaping import shaped_rewards
from marl_ray.algorithms.constraints.multipliers import Multiplier
from marl_ray.algorithms.losses.critics import ValueLossInputs, ppo_value_loss
from marl_ray.config import AlgorithmSpec
from marl_ray.errors import MarlRayError
from marl_ray.trajectories import Trajectories


class PolicyLossInputs(NamedTuple):
    """Inputs of a policy loss.

    They are R sequences at T steps, as sampled and as the current weights score them, (R, T) each.
    """

    log_probs: Tensor
    """Log-probabilities under the current policy, with gradients."""
    old_log_probs: Tensor
    """Log-probabilities under the policy that the update began with."""
    advantages: Tensor
    """Advantages, normalised, combined with the costs' and weighted; without gradients."""
    mask: Tensor
    """bool: decisions that are trained on."""
    behaviour_log_probs: Tensor
    """Log-probabilities under the policy that sampled, as recorded. They equal `old_log_probs`, unless the learner
    evaluates the latter itself because of `AlgorithmSpec.recompute`, `importance_cap` or bfloat16."""
    values: Tensor
    """The critic's estimates when the decisions were made, in reward units; 0 without a critic."""
    reference_log_probs: Tensor | None = None
    """Log-probabilities under the reference policy; None where `kl_coef` is 0."""


class PolicyLoss(NamedTuple):
    """The loss of each decision, (R, T) each field.

    The learner weighs and adds the losses (see `aggregation`).
    """

    loss: Tensor
    clipped: Tensor
    """bool: True where the clip took the gradient away."""


AdvantageEstimator = Callable[[Trajectories, Any], tuple[Tensor, Tensor | None]]
"""A function of the batch that returns advantages (B, T) in reward units, not normalised over the batch, and the
targets (B, T) of the critic, or None without a critic."""


@dataclass(frozen=True)
class Algorithm:
    """One named algorithm: its spec and pure functions on batches.

    Every function takes the policy's `hyper`, an object of the class that `spec.hyper` names, else an
    `HyperParameters`; because the class differs, the types say Any. Functions that take Trajectories get all rows of
    this worker; all other functions may get any part of a batch.
    """

    name: str
    spec: AlgorithmSpec
    advantages: AdvantageEstimator
    policy_loss: Callable[[PolicyLossInputs, Any], PolicyLoss]
    value_loss: Callable[[ValueLossInputs, Any], Tensor] = ppo_value_loss
    """(R, T) loss of the critic, and of each cost critic."""
    critic_targets: Callable[[Trajectories, Any], Tensor] | None = None
    """Targets (B, T) that the critic is fitted to before the advantages, for `AlgorithmSpec.critic_first`. Such a critic has
    units of its own, and after the fit the batch's `values` are its outputs."""
    shape_rewards: Callable[[Trajectories, Any, int, Tensor | None], Tensor] = shaped_rewards
    """Make the rewards (B, T) from which advantages are estimated. Its arguments are the batch, `hyper`, the greatest
    length of a sequence and, if `kl_place` is `reward`, the divergence (B, T) from the reference times its coefficient."""
    multiplier: Callable[[Any, float], Multiplier] | None = None
    """Make the first multiplier of a constraint from `hyper` and the constraint's budget.

    Only algorithms with `constraint: multiplier` have it."""
    rescale: bool = True
    """Divide the combined advantage by 1 + sum of the multipliers."""
    every_step: bool = False
    """Move the multipliers after every gradient step, and not once per batch."""

    def __post_init__(self) -> None:
        parts = {
            "critic_targets": (self.critic_targets is not None, self.spec.critic_first),
            "multiplier": (self.multiplier is not None, self.spec.constraint == "multiplier"),
        }
        for key, (present, needed) in parts.items():
            if present != needed:
                raise MarlRayError(f"algorithm {self.name}: its spec asks for {'a' if needed else 'no'} `{key}`")
