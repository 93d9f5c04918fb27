"""A batch as the gradient steps read it: everything in it is constant across the epochs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from marl_ray.training.costs import CostStats
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.trajectories import Trajectories


class OldOutputs(NamedTuple):
    """Outputs of the weights that the update begins with, (B, T)."""

    log_probs: Tensor
    values: Tensor
    """(B, T), the critic's raw outputs, in units of its normaliser. These outputs are the centre of the value clip."""
    cost_values: Tensor
    """(B, T, K), the cost critics' raw outputs, likewise."""


class MinibatchSize(NamedTuple):
    """The size of a minibatch, over all workers."""

    decisions: float
    sequences: float
    """Rows with a trained decision."""


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch ready for its epochs; (B, T) unless said otherwise, on the learner's device."""

    batch: Trajectories
    share: BatchShare
    minibatch_plan: list[list[Selection]]
    """The minibatches of every epoch."""
    mask: Tensor
    """bool: decisions that are trained on."""
    inputs: Any
    """The encoded inputs that the family's `score_decisions` takes; None where compiled code takes the steps."""
    order: Tensor | None
    """(copies,) numbers: a pass over copies with similar numbers costs less; None where all passes cost the same."""
    advantages: Tensor
    cost_advantages: Tensor
    """(B, T, K)."""
    returns: Tensor | None
    """In units of the value normaliser; None where the gradient steps train no critic."""
    cost_returns: Tensor | None
    """(B, T, K), in units of each signal's normaliser."""
    old: OldOutputs
    importance: Tensor | None
    """Weight of each decision's loss, where the policy that sampled may differ from the one that learns; else None."""
    reference: Tensor | None
    """Log-probabilities under the reference policy; None where the update reads no reference policy."""
    costs: CostStats
    violations: Tensor
    """(K,) constraint violations per decision, in the units of the cost advantages."""
    sizes: Tensor
    """(minibatches of all epochs, 2) the `MinibatchSize` of each, a row."""
    sequences: int
    """Rows with a trained decision, over all workers."""

    @property
    def behaviour_log_probs(self) -> Tensor:
        """(B, T) log-probabilities under the policy that sampled."""
        return self.batch.log_probs
