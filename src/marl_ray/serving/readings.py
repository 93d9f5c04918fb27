"""Readings: reports, charts and pages, which take the database and a processor, and must not slow acts and outcomes.

Readers have threads of their own. If several ask for the same reading at the same time, it is made once, after the last
of them has asked, so everybody reads all that was stored before the question. Then the reading pauses for a multiple of
the time that it took. So readers who ask without pause take only a part of one processor.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from marl_ray.serving.http.protocol import RequestError

T = TypeVar("T")

THREADS = 2
REST_FACTOR = 10.0
"""A reading that took t seconds is not made again for this many times t, ..."""
LONGEST_REST_S = 1.0
"""... but no longer than this."""
MOST_WAITING = 64
"""Different readings that may wait for a thread; more are refused with 503."""
RETRY_AFTER_S = 1.0


class Readings:
    """All readings of a replica, on one event loop."""

    def __init__(self, threads: int = THREADS, waiting: int = MOST_WAITING):
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reading")
        self._free = asyncio.Semaphore(threads)
        self._waiting = waiting
        self._next: dict[Hashable, asyncio.Task[Any]] = {}
        """Readings that have not begun, by what is read; who asks now may share them."""
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}
        self._rests: dict[Hashable, float] = {}
        """Until when a reading is not made again, by the monotonic clock."""

    async def read(self, what: Hashable, make: Callable[[], T]) -> T:
        """Call `make` in a thread, after this question, and return its result. Raises what it raises, and RequestError
        503 if too many different readings wait."""
        shared = self._next.get(what)
        if shared is None:
            if len(self._next) >= self._waiting:
                raise RequestError(503, None, f"{self._waiting} readings wait already", retry_after_s=RETRY_AFTER_S)
            shared = self._next[what] = asyncio.create_task(self._read(what, make, self._under_way.get(what)))
            shared.add_done_callback(_seen)
        # A reader who goes away does not take the answer from the others.
        reading: T = await asyncio.shield(shared)
        return reading

    async def _read(self, what: Hashable, make: Callable[[], T], earlier: "asyncio.Task[Any] | None") -> T:
        if earlier is not None:
            await asyncio.wait((earlier,))
        rest = self._rests.pop(what, 0.0) - time.monotonic()
        if rest > 0:
            await asyncio.sleep(rest)
        async with self._free:
            self._under_way[what] = self._next.pop(what)
            began = time.monotonic()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, make)
            finally:
                now = time.monotonic()
                self._rests = {other: until for other, until in self._rests.items() if until > now}
                self._rests[what] = now + min(LONGEST_REST_S, REST_FACTOR * (now - began))
                del self._under_way[what]

    def close(self) -> None:
        """End the threads; what waits is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _seen(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # which its readers, if any are left, have got
