"""Waits of tests: for a condition, with a deadline, and never for a time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 0.02
"""Seconds between two looks at a condition."""


def until(condition: Callable[[], Any], what: str = "a condition", deadline_s: float = 60.0) -> Any:
    """Wait until the condition holds, and return what it returned.

    An AssertionError names `what` when the time is over.
    """
    end = time.monotonic() + deadline_s
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(LOOK_S)
    return result


async def until_async(condition: Callable[[], Any], what: str = "a condition", deadline_s: float = 60.0) -> Any:
    """Wait as `until` does, and let other tasks of the event loop continue."""
    end = time.monotonic() + deadline_s
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        await asyncio.sleep(LOOK_S)
    return result
