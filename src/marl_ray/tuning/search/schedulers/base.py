"""What a scheduler sees and says. A scheduler is a pure function of what its trials have scored.

A trial runs in legs, each from a checkpoint to the next decision point. There it waits, unless it goes on or is stopped.
All that a scheduler knows is in the records of the sweep, so one that is taken up again decides as it would have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Standing:
    """One trial as schedulers see it."""

    number: int
    state: Literal["running", "waiting", "ended"]
    """`running` until the next decision point, or `waiting` at the last one."""
    scores: Mapping[int, float]
    """Decision point (environment steps) -> score, greater is better: the IQM over the seeds of the smoothed metric."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What it runs with now."""
    history: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Decision point -> what it ran with until then, where that differs."""

    @property
    def at(self) -> int:
        """The last decision point; 0 before the first."""
        return max(self.scores, default=0)


@dataclass(frozen=True)
class Exploit:
    """A trial takes over another's weights, optimiser state and progress, and goes on with these values."""

    donor: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Verdicts:
    """What becomes of waiting trials; one that is not named waits on."""

    go: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()
    exploits: Mapping[int, Exploit] = field(default_factory=dict)
    """By recipient; all of them also `go`."""


class Rule(Protocol):
    """A scheduler."""

    def next_stop(self, steps: int) -> int | None:
        """The first decision point after so many environment steps; None if there is none before the end."""
        ...

    def decide(self, trials: Mapping[int, Standing], more: int | None) -> Verdicts:
        """Look at all trials that have not failed; `more` configurations may still be started (None: it is not known)."""
        ...
