"""The circuit breaker of an arm.

It lets a replica stop asking an arm that fails, and try it again after a while.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from marl_ray.config import BreakerConfig

REMEMBERED_PASSES = 64
"""Failed passes that are remembered, so that requests of one pass count once."""


class CircuitState(StrEnum):
    """The states of a circuit: asked, not asked, probed."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The circuit of one arm in one replica, on one event loop. Any thread may read it.

    A request that may try the arm gets a ticket, and hands it in with its result. A result counts only in the state in
    which its ticket was given: a request sent before the circuit opened says nothing about the arm's present state.
    """

    def __init__(self, config: BreakerConfig, clock: Callable[[], float] = time.monotonic):
        """`clock` gives seconds."""
        self.opened = 0
        """The number of times that the circuit has opened."""
        self.failed_rounds = 0
        """Rounds of probes that have failed in a row since the circuit was last closed."""
        self._config = config
        self._clock = clock
        self.until = 0.0
        """End of the open state, in seconds of `clock`."""
        self._last = 0  # the last ticket
        self._passes: deque[int] = deque(maxlen=REMEMBERED_PASSES)
        self._enter(CircuitState.CLOSED)

    @property
    def state(self) -> CircuitState:
        """The present state. Reading it changes nothing, because the thread that reads metrics does too."""
        is_over = self._state is CircuitState.OPEN and self._clock() >= self.until
        return CircuitState.HALF_OPEN if is_over else self._state

    @property
    def retry_after_s(self) -> float:
        """Seconds until an open circuit lets probes through; 0 in the other states."""
        return self.until - self._clock() if self.state is CircuitState.OPEN else 0.0

    def allow(self) -> int:
        """Return a ticket (above 0) if a request may try the arm now, else 0.

        Half-open, at most `probes` tickets are out. The caller must hand in every ticket, to `success`, `failure` or
        `forget`; a second time does no harm.
        """
        state = self.state
        if state is CircuitState.OPEN or len(self._probes) >= self._config.probes:
            return 0
        if state is not self._state:
            self._enter(state)
        self._last += 1
        if state is CircuitState.HALF_OPEN:
            self._probes.add(self._last)
        return self._last

    def success(self, ticket: int) -> None:
        """Count the request of this ticket as answered."""
        if not self._counts(ticket):
            return
        if self._state is CircuitState.CLOSED:
            self._in_a_row = 0
            self._sessions.clear()
            return
        self._in_a_row += 1
        if self._in_a_row >= self._config.probes:
            self._enter(CircuitState.CLOSED)
            self.failed_rounds = 0

    def failure(self, ticket: int, pass_number: int | None = None, session: str | None = None) -> None:
        """Count the request of this ticket as failed.

        Requests of one pass or call (`pass_number`) count once. Before the circuit opens, so do those of one `session`,
        because it may send the same input again and again.
        """
        if pass_number is not None and pass_number in self._passes:
            self.forget(ticket)
            return
        if not self._counts(ticket):
            return
        if pass_number is not None:
            self._passes.append(pass_number)
        if self._state is CircuitState.CLOSED:
            if session is not None and session in self._sessions:
                return
            self._sessions.add(session)
            self._in_a_row += 1
            if self._in_a_row < self._config.failures:
                return
        else:
            self.failed_rounds += 1
        self.until = self._clock() + self._config.open_s
        self._enter(CircuitState.OPEN)
        self.opened += 1

    def forget(self, ticket: int) -> None:
        """Take back the ticket of a request without a result.

        The client has left, for example. A probe becomes free again.
        """
        self._probes.discard(ticket)

    def _counts(self, ticket: int) -> bool:
        if self._state is not CircuitState.HALF_OPEN:
            return ticket >= self._first
        counts = ticket in self._probes
        self._probes.discard(ticket)
        return counts

    def _enter(self, state: CircuitState) -> None:
        self._state = state
        self._first = self._last + 1  # the first ticket of this state
        self._in_a_row = 0  # failures when closed, successes when half-open
        self._sessions: set[str | None] = set()  # the sessions of these failures
        self._probes: set[int] = set()  # tickets of probes under way, when half-open
