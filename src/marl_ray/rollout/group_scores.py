"""Measure how much the scores of a group's members differ.

Members share a start, and group algorithms learn from their differences.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def is_informative(scores: np.ndarray) -> bool:
    """Return True if some agent scores differently in two members of the group.

    `scores` are (members, agents).
    """
    return bool((np.ptp(scores, axis=0) > 0).any())


class GroupSums(NamedTuple):
    """Sums over groups; the sums of several workers can be added."""

    groups: int = 0
    informative: int = 0
    """Number of groups in which some agent did not score the same in all members."""
    deviation: float = 0.0
    """Sum of the standard deviations over the members, each averaged over the agents."""

    @classmethod
    def from_scores(cls, scores: Sequence[np.ndarray]) -> "GroupSums":
        """Add up over groups, each given as scores (members, agents)."""
        return cls(
            len(scores), sum(map(is_informative, scores)), float(sum(group.std(axis=0).mean() for group in scores))
        )

    def __add__(self, other: "GroupSums") -> "GroupSums":  # type: ignore[override]
        return GroupSums(
            self.groups + other.groups, self.informative + other.informative, self.deviation + other.deviation
        )

    def metrics(self) -> dict[str, float]:
        """Return `group_std` and `informative_groups`; nothing without groups."""
        if not self.groups:
            return {}
        return {"group_std": self.deviation / self.groups, "informative_groups": self.informative / self.groups}
