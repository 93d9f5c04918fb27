"""The experiments that have ended, as two threads and the requests of a replica know them."""

import math
import threading

from marl_ray.serving.routing.endpoints import DRAIN_S


class EndedExperiments:
    """The experiments that this process has seen end, and when their evidence is due to be read again.

    Every method is safe to call from any thread, and none blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, float] = {}
        """Experiment -> moment at which it ended, in seconds since 1970."""
        self._due: dict[str, float] = {}
        """Experiment -> moment of its next look, by the database's clock; absent while no unit is in its outcome
        window."""

    def add(self, name: str, at: float) -> None:
        """Note that an experiment has ended, in seconds since 1970. The experiment's evidence is due at once."""
        with self._lock:
            self._ended[name] = at
            self._due[name] = -math.inf

    def draining_experiments(self, now: float) -> dict[str, float]:
        """Return experiment -> moment of its end, for those that ended less than `DRAIN_S` before `now`.

        The ends of all others are forgotten.
        """
        with self._lock:
            self._ended = {name: at for name, at in self._ended.items() if now - at < DRAIN_S}
            return dict(self._ended)

    def names(self) -> list[str]:
        """Return the names of the experiments whose end is not forgotten."""
        with self._lock:
            return list(self._ended)

    def note_due(self, name: str, at: float = -math.inf) -> None:
        """Note that an experiment's evidence may have changed by the moment `at` of the database's clock.

        Without `at` it may have changed by now. An earlier moment that was noted before remains.
        """
        with self._lock:
            self._due[name] = min(at, self._due.get(name, math.inf))

    def note_read(self, name: str) -> None:
        """Note that an experiment's evidence is about to be read. What is noted as due after this call is due again."""
        with self._lock:
            self._due.pop(name, None)

    def due_looks(self) -> dict[str, float]:
        """Return experiment -> moment of its next look, by the database's clock."""
        with self._lock:
            return dict(self._due)
