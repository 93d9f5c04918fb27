"""Reads that requests share: reports, charts and pages.

They need the database and a processor, and must not slow acts, so they run in threads of their own. Requests for the
same one share one execution, which begins after the last of them has asked, so every reader sees all that was stored
before the request. Afterwards that read pauses for a multiple of the time that it took, so that clients who ask without
pause occupy only a part of one processor.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from marl_ray.serving.http.protocol import RequestError

T = TypeVar("T")

THREADS = 2
"""Number of threads, and so of reads that run at once."""
REST_FACTOR = 10.0
"""A reading pauses for this many times the time that it took."""
MAX_REST_S = 1.0
"""Upper limit of a reading's pause."""
MAX_WAITING = 64
"""Different reads that may wait for a thread; more are refused with 503."""
RETRY_AFTER_S = 1.0
"""Seconds after which a refused client may ask again."""


class SharedReads:
    """The shared reads of a replica, on one event loop."""

    def __init__(
        self,
        threads: int = THREADS,
        waiting: int = MAX_WAITING,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """`clock` gives seconds, and `sleep` lets so many of them pass."""
        self._clock, self._sleep = clock, sleep
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reading")
        self._free = asyncio.Semaphore(threads)
        self._waiting = waiting
        self._next: dict[Hashable, asyncio.Task[Any]] = {}
        """Reads that have not begun, by what is read; a new request for one of them shares it."""
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}
        self._rests: dict[Hashable, float] = {}
        """Moment at which a reading's pause ends, by `clock`."""

    async def read(self, what: Hashable, make: Callable[[], T]) -> T:
        """Call `make` in a thread, after this request, and return its result.

        Raises whatever `make` raises, and RequestError 503 if too many different reads wait.
        """
        shared = self._next.get(what)
        if shared is None:
            if len(self._next) >= self._waiting:
                raise RequestError(503, None, f"{self._waiting} readings wait already", retry_after_s=RETRY_AFTER_S)
            shared = self._next[what] = asyncio.create_task(self._read(what, make, self._under_way.get(what)))
            shared.add_done_callback(_seen)
        # A cancelled reader must not cancel the task that other readers share.
        reading: T = await asyncio.shield(shared)
        return reading

    async def _read(self, what: Hashable, make: Callable[[], T], earlier: "asyncio.Task[Any] | None") -> T:
        if earlier is not None:
            await asyncio.wait((earlier,))
        rest = self._rests.pop(what, 0.0) - self._clock()
        if rest > 0:
            await self._sleep(rest)
        async with self._free:
            self._under_way[what] = self._next.pop(what)
            began = self._clock()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, make)
            finally:
                now = self._clock()
                self._rests = {other: until for other, until in self._rests.items() if until > now}
                self._rests[what] = now + min(MAX_REST_S, REST_FACTOR * (now - began))
                del self._under_way[what]

    def close(self) -> None:
        """End the threads, and drop the reads that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _seen(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio logs no error of a reading whose readers have all left
