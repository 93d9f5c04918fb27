"""The units that a replica remembers, so that most requests need no lookup in the store."""

import time
from dataclasses import dataclass

from marl_ray.experiments.assignment.rendezvous import Assignment

MAX_REMEMBERED = 100_000
"""Units per experiment that a replica remembers; a forgotten one costs one ignored insert, or one lookup."""
OVERLAP_S = 2.0
"""Seconds in which two replicas may assign by different tables, with some reserve."""


@dataclass(slots=True)
class RememberedUnit:
    """The facts that a replica remembers of one unit."""

    assignment: Assignment
    at: float
    """Moment of its first exposure by this replica, monotonic seconds."""
    sure: bool
    """False if the store must be asked again at the unit's next act."""
    acts: int = 0
    """Number of the unit's acts in this replica."""
    seconds: float = 0.0
    """Time that the unit's acts took in this replica, in seconds."""
    failed: bool = False
    """True if the unit's arm has failed at least once."""


class RememberedUnits:
    """The units of one experiment, on one event loop; `doubt_since` may be called from any thread."""

    def __init__(self) -> None:
        self.units: dict[str, RememberedUnit] = {}
        """Unit -> what is remembered of it, for the last MAX_REMEMBERED units."""
        self._absent: dict[str, float] = {}
        """Unit -> moment until which the store is not asked for it again, in monotonic seconds."""

    def add(self, unit: str, remembered: RememberedUnit) -> None:
        """Remember a unit, and forget the oldest one if there are too many."""
        if len(self.units) >= MAX_REMEMBERED:
            del self.units[next(iter(self.units))]  # the oldest
        self.units[unit] = remembered

    def doubt_since(self, moment: float) -> None:
        """Let the store be asked again for units that another replica may have assigned by another table.

        These units were first exposed here after `moment`, in monotonic seconds, or shortly before it.
        """
        for remembered in list(self.units.values()):
            if remembered.at > moment - OVERLAP_S:
                remembered.sure = False

    def is_absent(self, unit: str) -> bool:
        """Return True if the store has lately had no exposure of the unit."""
        return self._absent.get(unit, 0.0) > time.monotonic()

    def note_absent(self, unit: str) -> None:
        """Note that the store has no exposure of the unit.

        So the store is not asked again for as long as replicas may differ.
        """
        self._absent.pop(unit, None)
        if len(self._absent) >= MAX_REMEMBERED:
            del self._absent[next(iter(self._absent))]  # the oldest
        self._absent[unit] = time.monotonic() + OVERLAP_S
