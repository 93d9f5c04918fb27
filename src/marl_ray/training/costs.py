"""The costs of episodes, which constraints compare with their budgets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostStats:
    """The mean costs of the episodes that ended in this batch."""

    means: tuple[float, ...] | None
    """Mean cost of an episode by signal; None while no episode has ended."""
    episodes: int
    """Number of episodes that ended in this batch, on all workers; 0 if `means` are those of earlier ones."""
    decisions: float = 1.0
    """Mean number of decisions of the learner's policy in one of these episodes, all its agents together."""
