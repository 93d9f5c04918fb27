"""Leaving on Ctrl-C or SIGTERM: say at once what is kept, then clean up undisturbed and with deadlines."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""What Ctrl-C and, where a handler makes it an exit, SIGTERM raise."""
LEAVE_S = 5.0
"""How long one thing may take while an interrupted process cleans up."""


@contextmanager
def answering(say: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `say` at once, whatever the body waits for, and then raise; later ones do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    def answer(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        say()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, answer) for number in numbers}
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
