"""What an algorithm is to the learner: two pure functions, and what its `Spec` says of the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from marl_ray.algorithms.multipliers import Multiplier
from marl_ray.config import SPECS, AlgorithmConfig, AlgorithmName, Spec
from marl_ray.trajectories import Trajectories


class Evaluated(NamedTuple):
    """Decisions of R sequences at T steps, evaluated by the current weights and as they were when gathered; (R, T) each."""

    log_probs: Tensor
    """Of the current policy, with gradients."""
    old_log_probs: Tensor
    """Of the policy that the update began with."""
    advantages: Tensor
    """Normalised, combined with costs, weighted; detached."""
    mask: Tensor
    """bool: decisions that are trained on."""


class PolicyLoss(NamedTuple):
    """Per decision, (R, T) each; the learner weighs and adds them (see `aggregation`)."""

    loss: Tensor
    clipped: Tensor
    """bool: the clip took the gradient away."""


Estimator = Callable[[Trajectories, AlgorithmConfig], tuple[Tensor, Tensor | None]]
"""Advantages (B, T) in reward units, not normalised over the batch, and the critic's targets (B, T) if there is one."""


@dataclass(frozen=True)
class Algorithm:
    """One named algorithm."""

    name: AlgorithmName
    advantages: Estimator
    policy_loss: Callable[[Evaluated, AlgorithmConfig], PolicyLoss]
    multiplier: Callable[[AlgorithmConfig, float], Multiplier] | None = None
    """What a constraint with a given budget starts with, for `constraint: multiplier`."""
    rescale: bool = True
    """Divide the combined advantage by 1 + sum of the multipliers."""
    every_step: bool = False
    """Move the multipliers after every gradient step, and not once per batch."""

    @property
    def spec(self) -> Spec:
        return SPECS[self.name]
