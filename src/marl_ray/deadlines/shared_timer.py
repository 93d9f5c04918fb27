"""Deadlines of many short requests, with one timer for all.

One for each would cost more than a small forward pass.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

CHECK_S = 0.05
"""Seconds between two checks; a deadline takes effect late by this much at most."""


class _Entry:
    __slots__ = ("at", "missed", "task")

    def __init__(self, task: "asyncio.Task[object]", at: float):
        self.task, self.at, self.missed = task, at, False


class Deadlines:
    """Keeps the deadlines of one event loop."""

    def __init__(self) -> None:
        self._under_way: set[_Entry] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work: Awaitable[T], seconds: float) -> T:
        """Run `work` and return its result. After `seconds`, cancels `work` and raises TimeoutError."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        entry = _Entry(task, loop.time() + seconds)
        self._under_way.add(entry)
        if self._timer is None:
            self._timer = loop.call_later(CHECK_S, self._check, loop)
        try:
            return await work
        except asyncio.CancelledError:
            if entry.missed and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            self._under_way.discard(entry)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for entry in self._under_way:
            if now >= entry.at and not entry.missed:
                entry.missed = True
                entry.task.cancel()
        self._timer = loop.call_later(CHECK_S, self._check, loop) if self._under_way else None
