"""Reads that requests share: reports, charts and pages.

These reads need the database and a processor, and must not slow acts, so they run in threads of their own. Requests for
the same one share one execution, which begins after the last of them has asked, so every reader sees all that was
stored before the request. Afterwards that read pauses for a multiple of the time that it took, so that clients who ask
without pause occupy only a part of one processor.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from marl_ray.serving.errors import BusyError

T = TypeVar("T")

THREADS = 2
"""Number of threads, and so of reads that run at once."""
PAUSE_FACTOR = 10.0
"""A read pauses for this many times the time that it took, and so occupies an eleventh of a processor at most if it takes
0.1 s at most; MAX_PAUSE_S limits the pause of a longer one."""
MAX_PAUSE_S = 1.0
"""Maximum seconds that a read pauses."""
MAX_WAITING = 64
"""Maximum number of different reads that wait for a thread; more are refused."""


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
        self._clock = clock
        self._sleep = sleep
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reading")
        self._free_threads = asyncio.Semaphore(threads)
        self._waiting = waiting
        self._next: dict[Hashable, asyncio.Task[Any]] = {}
        """Reads that have not begun, by what is read; a new request for one of them shares it."""
        self._under_way: dict[Hashable, asyncio.Task[Any]] = {}
        self._pause_ends: dict[Hashable, float] = {}
        """Key of a read -> moment at which its pause ends, by `clock`."""

    async def read(self, key: Hashable, make: Callable[[], T]) -> T:
        """Call `make` in a thread, after this request, and return its result.

        Requests with an equal `key` share one call. Raises whatever `make` raises, and BusyError if too many
        different reads wait.
        """
        shared = self._next.get(key)
        if shared is None:
            if len(self._next) >= self._waiting:
                raise BusyError(f"{self._waiting} readings wait already")
            shared = self._next[key] = asyncio.create_task(self._read(key, make, self._under_way.get(key)))
            shared.add_done_callback(_retrieve_error)
        # A cancelled reader must not cancel the task that other readers share.
        result: T = await asyncio.shield(shared)
        return result

    async def _read(self, key: Hashable, make: Callable[[], T], earlier: "asyncio.Task[Any] | None") -> T:
        if earlier is not None:
            await asyncio.wait((earlier,))
        pause_s = self._pause_ends.pop(key, 0.0) - self._clock()
        if pause_s > 0:
            await self._sleep(pause_s)
        async with self._free_threads:
            self._under_way[key] = self._next.pop(key)
            began = self._clock()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, make)
            finally:
                now = self._clock()
                self._pause_ends = {other: until for other, until in self._pause_ends.items() if until > now}
                self._pause_ends[key] = now + min(MAX_PAUSE_S, PAUSE_FACTOR * (now - began))
                del self._under_way[key]

    def close(self) -> None:
        """End the threads, and drop the reads that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _retrieve_error(task: "asyncio.Task[Any]") -> None:
    """Retrieve the error of a read, because asyncio would log it if all its readers have left."""
    if not task.cancelled():
        task.exception()
