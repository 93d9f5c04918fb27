"""Asking the database which arm a session has: sessions that are asked for at the same time share one statement."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from marl_ray.experiments.assignment import Assignment

MOST_UNITS = 500
"""In one statement."""
Asked = tuple[str, str]
"""Experiment and unit."""
Answers = Mapping[Asked, Assignment]


class LookUps:
    """On one event loop. While a statement is under way, what is asked for meanwhile waits for the next one."""

    def __init__(self, read: Callable[[Sequence[Asked]], Answers], threads: int):
        """`read` blocks on the database; at most `threads` of its calls are under way."""
        self._read = read
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="experiment-look-up")
        self._most, self._running = threads, 0
        self._waiting: dict[Asked, asyncio.Future[Assignment | None]] = {}
        self._under_way: dict[Asked, asyncio.Future[Assignment | None]] = {}

    async def ask(self, experiment: str, unit: str) -> Assignment | None:
        """The arm of the unit's exposure in the store, or None. Raises what `read` raises."""
        asked = experiment, unit
        # One that is under way may have been read before the exposure was written, but so may the first asker's.
        answer = self._under_way.get(asked) or self._waiting.get(asked)
        if answer is None:
            answer = self._waiting[asked] = asyncio.get_running_loop().create_future()
            if self._running < self._most:
                self._running += 1
                asyncio.get_running_loop().create_task(self._run())
        return await asyncio.shield(answer)  # who leaves ends nobody else's look-up

    async def _run(self) -> None:
        """Read until nothing waits."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                taken = dict(list(self._waiting.items())[:MOST_UNITS])
                for asked in taken:
                    del self._waiting[asked]
                self._under_way |= taken
                try:
                    found = await loop.run_in_executor(self._threads, self._read, list(taken))
                except Exception as error:
                    self._settle(taken, error=error)
                else:
                    self._settle(taken, found)
        finally:
            self._running -= 1

    def _settle(
        self,
        taken: Mapping[Asked, "asyncio.Future[Assignment | None]"],
        found: Answers | None = None,
        error: Exception | None = None,
    ) -> None:
        for asked, answer in taken.items():
            self._under_way.pop(asked, None)
            if error is None:
                answer.set_result((found or {}).get(asked))
            else:
                answer.set_exception(error)
                answer.exception()  # read, should nobody wait any more

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
