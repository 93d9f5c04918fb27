"""Copies of traffic for arms that answer nobody: what would they have done?"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from marl_ray.errors import one_line
from marl_ray.serving.arms.protocol import Answer

Act = Callable[[Mapping[str, np.ndarray], bool, Mapping[str, np.ndarray]], Awaitable[Answer]]
"""Observations, whether greedy, and action masks -> answer."""
COMPLAINT_S = 60.0
"""An arm's errors are logged at most this often."""
_log = logging.getLogger(__name__)


@dataclass
class ShadowTotals:
    """What became of one arm's copies since the start of the replica."""

    acts: int = 0
    """Copies that were answered."""
    errors: int = 0
    """Copies that failed or took too long."""
    dropped: int = 0
    """Copies that were not sent, because too many were under way."""
    decisions: int = 0
    """Actions of the answered copies, one per agent."""
    agreed: int = 0
    """Those that equal the action that the client got."""
    seconds: float = 0.0
    """Time that the answered copies took, all together."""


class Shadows:
    """The copies of one replica, on its event loop."""

    def __init__(self, limit: int, deadline_s: float = 5.0, clock: Callable[[], float] = time.monotonic):
        """At most `limit` copies are under way, each for at most `deadline_s`. `clock` gives seconds."""
        self.totals: dict[str, ShadowTotals] = {}
        """Per arm."""
        self._limit = limit
        self._deadline_s = deadline_s
        self._clock = clock
        self._complained: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(
        self,
        arm: str,
        act: Act,
        observations: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
        answer: Answer,
    ) -> bool:
        """Ask the arm greedily what `answer` answers, later and by itself; whether the copy was sent. Never raises."""
        totals = self.totals.setdefault(arm, ShadowTotals())
        if self._closed or len(self._tasks) >= self._limit:
            totals.dropped += 1
            return False
        task = asyncio.create_task(self._copy(arm, act, observations, masks, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Cancel what is under way and wait for its end, for at most a copy's deadline."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadline_s)

    async def _copy(
        self,
        arm: str,
        act: Act,
        observations: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
        answer: Answer,
    ) -> None:
        totals = self.totals[arm]
        begun = self._clock()
        try:
            async with asyncio.timeout(self._deadline_s):
                copied = await act(observations, True, masks)
            agreed = sum(np.array_equal(action, copied[agent][0]) for agent, (action, _) in answer.items())
        # A cancellation that does not come from `close` is the arm's own.
        except (Exception, asyncio.CancelledError) as error:
            if not self._closed:
                totals.errors += 1
                self._complain(arm, totals, error)
            return
        totals.acts += 1
        totals.decisions += len(answer)
        totals.agreed += agreed
        totals.seconds += self._clock() - begun

    def _complain(self, arm: str, totals: ShadowTotals, error: BaseException) -> None:
        now = self._clock()
        if now - self._complained.get(arm, -math.inf) < COMPLAINT_S:
            return
        self._complained[arm] = now
        _log.warning("shadow %s: %d copies failed so far, this one of %s", arm, totals.errors, _reason(error))


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    return name if not str(error).strip() else f"{name}: {one_line(error)}"
