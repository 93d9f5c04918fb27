"""Make calls that wait (for a sandbox, for HTTP) side by side, each with a deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from queue import Empty, SimpleQueue


class CallTimeoutError(Exception):
    """Call number `index` did not return before its deadline."""

    def __init__(self, index: int):
        super().__init__(f"call {index} did not return in time")
        self.index = index


def run_side_by_side(calls: Sequence[Callable[[], None]], threads: int, deadline_s: float) -> None:
    """Make all calls, at most `threads` at once, each within `deadline_s` seconds of its own beginning.

    Raises the error of the first call, in the order of the calls, that failed, or CallTimeoutError. The threads are
    daemons, so one that hangs keeps no process alive; Python would wait at exit for the threads of an executor.
    """
    waiting, done = SimpleQueue[int](), SimpleQueue[int]()
    began: dict[int, float] = {}
    errors: dict[int, BaseException] = {}
    for i in range(len(calls)):
        waiting.put(i)

    def work() -> None:
        while True:
            try:
                i = waiting.get_nowait()
            except Empty:
                return
            began[i] = time.monotonic()
            try:
                calls[i]()
            except BaseException as error:
                errors[i] = error
            done.put(i)

    for _ in range(min(threads, len(calls))):
        threading.Thread(target=work, daemon=True).start()
    running = set(range(len(calls)))
    while running:
        now = time.monotonic()
        oldest = min(running, key=lambda i: began.get(i, now))
        try:
            running.remove(done.get(timeout=max(0.0, began.get(oldest, now) + deadline_s - now)))
        except Empty:
            if oldest in began:
                _drain(waiting)
                raise CallTimeoutError(oldest) from None
    if errors:
        raise errors[min(errors)]


def shut_down(executor: Executor, deadline_s: float) -> bool:
    """Cancel the calls of an executor that have not begun, and wait for the others.

    Returns False if one of them has not ended after `deadline_s` seconds; an executor's `shutdown` would wait for ever.
    """
    try:
        run_side_by_side([partial(executor.shutdown, cancel_futures=True)], 1, deadline_s)
    except CallTimeoutError:
        return False
    return True


def _drain(waiting: SimpleQueue[int]) -> None:
    """Empty the queue, so that the threads that still run make no further call."""
    while True:
        try:
            waiting.get_nowait()
        except Empty:
            return
