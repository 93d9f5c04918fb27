"""Interface of schedulers. A scheduler is a pure function from its trials' scores to verdicts.

A trial runs in legs, each from a checkpoint to the next decision point. There it waits until it goes on or is stopped.
The sweep's records hold all that a scheduler knows, so a sweep that is continued decides as it would have decided
before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from marl_ray.config.sweep import SweepConfig


@dataclass(frozen=True)
class TrialStanding:
    """One trial as schedulers see it."""

    number: int
    state: Literal["running", "waiting", "ended"]
    """`running` until the next decision point, or `waiting` at the last one, or `ended`."""
    scores: Mapping[int, float]
    """Decision point (environment steps) -> score, greater is better: the IQM over the seeds of the smoothed metric."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values that the trial runs with now."""
    history: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Decision point -> the values until then, for points before which they differed."""

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
class TrialVerdicts:
    """Decisions about waiting trials; a trial that is in none of them waits on."""

    go: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()
    exploits: Mapping[int, Exploit] = field(default_factory=dict)
    """Recipient -> its exploit; every recipient is also in `go`."""


class Scheduler(Protocol):
    """The scheduler of one sweep."""

    def next_stop(self, steps: int) -> int | None:
        """The first decision point after `steps` environment steps; None if there is none before the end."""
        ...

    def decide(self, trials: Mapping[int, TrialStanding], more: int | None) -> TrialVerdicts:
        """Decide about all trials that have not failed; `more` configurations may still be started (None: number
        unknown)."""
        ...


class SchedulerType(Protocol):
    """Makes the scheduler of a sweep: a class, such as `AshaScheduler`."""

    Settings: Any
    """The class of its keys under `scheduler`: it extends `marl_ray.config.schedulers.SchedulerSettings`."""

    def __call__(self, settings: Any, sweep: SweepConfig, total_steps: int) -> Scheduler:
        """Make the scheduler of a sweep whose runs have `total_steps` environment steps; `settings` are its `Settings`.

        Raises ValueError with the reason if it cannot schedule this sweep.
        """
