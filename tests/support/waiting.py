"""Waits of tests: for a condition, with a deadline, and never for a time."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

LOOK_S = 0.02
"""Seconds between two looks at a condition."""


def until(
    condition: Callable[[], Any],
    what: str,
    deadline_s: float = 60.0,
    details: Callable[[], Any] | None = None,
    look_s: float = LOOK_S,
) -> Any:
    """Wait until the condition holds, and return what it returned.

    An AssertionError names `what` when the time is over, and says what `details` returns.
    """
    end = time.monotonic() + deadline_s
    while not (result := condition()):
        if time.monotonic() >= end:
            raise AssertionError(f"waited {deadline_s:g} s for {what}" + (f": {details()}" if details else ""))
        time.sleep(look_s)
    return result


async def until_async(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    """Wait as `until` does, and let other tasks of the event loop continue."""
    end = time.monotonic() + deadline_s
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        await asyncio.sleep(LOOK_S)
    return result


def until_ended(processes: Iterable[psutil.Process], deadline_s: float = 60.0) -> None:
    """Wait until none of the processes runs. A zombie has ended: in a container, often nobody waits for it."""
    running = list(processes)

    def all_ended() -> bool:
        running[:] = [process for process in running if not _has_ended(process)]
        return not running

    until(all_ended, "processes to end", deadline_s, lambda: running)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
