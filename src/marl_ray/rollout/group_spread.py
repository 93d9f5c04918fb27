"""Measure how the scores of a group's members, which share a start, differ: group algorithms learn from differences."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def informative(scores: np.ndarray) -> bool:
    """True if some agent scores differently in two members of a group, from scores (members, agents)."""
    return bool((np.ptp(scores, axis=0) > 0).any())


class GroupSums(NamedTuple):
    """Sums over groups; those of several workers add up."""

    groups: int = 0
    informative: int = 0
    """Groups in which some agent did not score the same in all members."""
    spread: float = 0.0
    """Sum of the standard deviations over the members, each averaged over the agents."""

    @classmethod
    def from_scores(cls, scores: Sequence[np.ndarray]) -> "GroupSums":
        """Sum over groups, each given as scores (members, agents)."""
        return cls(len(scores), sum(map(informative, scores)), float(sum(own.std(axis=0).mean() for own in scores)))

    def __add__(self, other: "GroupSums") -> "GroupSums":  # type: ignore[override]
        return GroupSums(self.groups + other.groups, self.informative + other.informative, self.spread + other.spread)

    def metrics(self) -> dict[str, float]:
        """`group_spread` and `informative_groups`; nothing without groups."""
        if not self.groups:
            return {}
        return {"group_spread": self.spread / self.groups, "informative_groups": self.informative / self.groups}
