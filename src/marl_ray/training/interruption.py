"""Leaving on Ctrl-C or SIGTERM: say at once what is kept, then clean up undisturbed and with deadlines."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""What Ctrl-C and, where a handler makes it an exit, SIGTERM raise."""
LEAVE_S = 1.0
"""How long one thing may take while an interrupted process cleans up."""


@contextmanager
def signals_ignored() -> Iterator[None]:
    """A second Ctrl-C, or SIGTERM, does not cut a clean-up short."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether the action ended in time without an error; it goes on, on a thread that holds nothing up, where it did not."""
    done = threading.Event()

    def run() -> None:
        try:
            action()
        except Exception:
            return
        done.set()

    threading.Thread(target=run, name="leaving", daemon=True).start()
    return done.wait(seconds)
