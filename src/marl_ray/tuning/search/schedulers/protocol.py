"""Interface of schedulers. A scheduler is a pure function from its trials' scores to verdicts.

A trial runs in legs, each from a checkpoint to the next decision point. There it waits until it continues or
is stopped. The sweep's records hold all that a scheduler knows, so a sweep that is continued decides as it
would have before.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from marl_ray.config.sweep import SweepConfig
from marl_ray.json_types import JsonMapping


@dataclass(frozen=True)
class TrialStanding:
    """One trial as schedulers see it."""

    number: int
    state: Literal["running", "waiting", "ended"]
    """`running` until the next decision point, or `waiting` at the last one, or `ended`."""
    scores: Mapping[int, float]
    """Decision point (environment steps) -> score, greater is better: the IQM over the seeds of the smoothed metric."""
    values: JsonMapping = field(default_factory=dict)
    """Values that the trial runs with now."""
    history: Mapping[int, JsonMapping] = field(default_factory=dict)
    """Decision point of an exploit -> the values before it."""
    donors: Mapping[int, int] = field(default_factory=dict)
    """Decision point of an exploit -> the number of the trial whose weights were taken over."""

    @property
    def at(self) -> int:
        """The last decision point; 0 before the first."""
        return max(self.scores, default=0)

    def values_until(self, at: int) -> JsonMapping:
        """Return the values with which the trial trained up to a decision point."""
        exploit = min((point for point in self.history if point >= at), default=None)
        return self.values if exploit is None else self.history[exploit]


WORST_SCORE = -1e300
"""Score of a trial that has not reported its metric yet; JSON has no infinity."""
_Place = tuple[float, int]
"""A trial's score with its sign changed, and its number: the first place is the best."""
_Order = list[_Place]
"""Places of trials, the best first."""


class TrialStandings(Mapping[int, TrialStanding]):
    """The trials that have not failed, by number.

    The trials' order at every decision point is kept as they arrive, so that a decision about thousands of trials costs
    what one about a few does.
    """

    def __init__(self, standings: Iterable[TrialStanding] = ()):
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        self._standings: dict[int, TrialStanding] = {}
        self._arrived: dict[int, _Order] = {}
        """Decision point -> all trials that have a score there."""
        self._waiting: dict[int, _Order] = {}
        """Decision point -> the trials that wait there."""
        self._places: dict[int, list[tuple[_Order, _Place]]] = {}
        """Trial -> its place in each of these orders."""
        for standing in standings:
            self.put(standing)

    def __getitem__(self, number: int) -> TrialStanding:
        return self._standings[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._standings)

    def __len__(self) -> int:
        return len(self._standings)

    def put(self, standing: TrialStanding) -> None:
        """Add a trial, or replace what was known of it."""
        number = standing.number
        self.remove(number)
        self._standings[number] = standing
        if standing.state != "ended":
            (self.running if standing.state == "running" else self.waiting).add(number)
        orders = [(self._arrived, at) for at in standing.scores]
        if standing.state == "waiting" and standing.scores:
            orders.append((self._waiting, standing.at))
        # The scores are kept as they are now, because the sweep's record, to which they belong, changes.
        self._places[number] = [(order.setdefault(at, []), (-standing.scores[at], number)) for order, at in orders]
        for order, place in self._places[number]:
            insort(order, place)

    def remove(self, number: int) -> None:
        """Forget a trial, such as one that has failed; one that is not known is no error."""
        for order, place in self._places.pop(number, ()):
            del order[bisect_left(order, place)]
        self._standings.pop(number, None)
        self.running.discard(number)
        self.waiting.discard(number)

    def count_reached(self, at: int) -> int:
        """Return the number of trials that have a score at decision point `at`."""
        return len(self._arrived.get(at, ()))

    def waiting_in_best(self, at: int, places: int) -> list[int]:
        """Return the trials that wait at `at` and are among its `places` best, best first, the earlier among equals."""
        arrived, best = self._arrived.get(at, []), []
        for place in self._waiting.get(at, ()):
            if bisect_left(arrived, place) >= places:
                break
            best.append(place[1])
        return best


@dataclass(frozen=True)
class Exploit:
    """A trial takes over another's weights, optimiser state and progress, and continues with these values."""

    donor: int
    values: JsonMapping


@dataclass(frozen=True)
class TrialVerdicts:
    """Decisions about waiting trials; a trial that is in none of them waits on."""

    continuing: frozenset[int] = frozenset()
    """Numbers of the trials that train on to their next decision point."""
    stopping: frozenset[int] = frozenset()
    """Numbers of the trials that end here."""
    exploits: Mapping[int, Exploit] = field(default_factory=dict)
    """Recipient -> its exploit; every recipient is also in `continuing`."""


class Scheduler(Protocol):
    """The scheduler of one sweep."""

    def next_stop(self, steps: int) -> int | None:
        """Return the first decision point after `steps` environment steps.

        Returns None if there is none before the end.
        """
        ...

    def decide(self, trials: TrialStandings, more: int | None) -> TrialVerdicts:
        """Decide about all trials that have not failed.

        `more` is the number of configurations that may still be started; None if it is unknown.
        """
        ...


class SchedulerType(Protocol):
    """Makes the scheduler of a sweep: a class, such as `AshaScheduler`."""

    Settings: Any
    """The class of its keys under `scheduler`: it extends `marl_ray.config.schedulers.SchedulerSettings`."""

    def __call__(self, settings: Any, sweep: SweepConfig, total_steps: int) -> Scheduler:
        """Make the scheduler of a sweep whose runs have `total_steps` environment steps.

        `settings` are of its class `Settings`. Raises ValueError with the reason if it cannot schedule this sweep.
        """
