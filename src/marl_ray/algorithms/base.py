"""What an algorithm is to the learner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from marl_ray.config import AlgorithmConfig
from marl_ray.trajectories import Trajectories


class Evaluated(NamedTuple):
    """A minibatch of N decisions, evaluated by the current weights and as it was when gathered."""

    log_probs: Tensor
    """(N,) of the current policy."""
    values: Tensor
    """(N,) of the current critic, in units of the value normaliser."""
    old_log_probs: Tensor
    old_values: Tensor
    """(N,) in units of the value normaliser."""
    advantages: Tensor
    """(N,) normalised over the global batch."""
    returns: Tensor
    """(N,) targets of the critic, in units of the value normaliser."""


class Losses(NamedTuple):
    """Per decision, (N,) each; the learner averages them over the decisions of the global minibatch."""

    policy: Tensor
    value: Tensor
    kl: Tensor
    """Estimate (k3) of the divergence from the policy that gathered the batch; a metric, not a loss."""
    clipped: Tensor
    """1 where the ratio clip took the gradient away."""


@dataclass(frozen=True)
class Algorithm:
    """One named choice of advantage estimator, losses and critic."""

    name: str
    paper: str
    critic: Literal["local", "central"]
    advantages: Callable[[Trajectories, AlgorithmConfig], tuple[Tensor, Tensor]]
    """Advantages and critic targets, (B, T) each, in reward units and not normalised."""
    losses: Callable[[Evaluated, AlgorithmConfig], Losses]
