"""Leave on Ctrl-C or SIGTERM.

The process says at once which checkpoint is kept, and then cleans up undisturbed and with deadlines.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""The exceptions that Ctrl-C raises, and SIGTERM where a handler turns it into an exit."""
LEAVE_S = 5.0
"""Seconds that one clean-up of an interrupted process may take."""


@contextmanager
def interrupt_handler(say: Callable[[], None]) -> Iterator[None]:
    """Call `say` at once on Ctrl-C and SIGTERM and then raise, within the block and again at its end.

    Later signals do nothing. The block may raise another exception in between: Ray puts an exit of status 1 in the place of
    what is raised while it waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    received: list[int] = []

    def handle_signal(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        say()
        raise _interrupt(number)

    before = {number: signal.signal(number, handle_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if received:
            raise _interrupt(received[0]) from None


def _interrupt(number: int) -> BaseException:
    """Return the exception by which a process ends as others do on this signal: with status 130 or 143."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def run_within(seconds: float, action: Callable[[], object]) -> bool:
    """Run the action on its own thread; return True if it ends within `seconds` without an error.

    An action that takes longer continues in its thread, which does not keep the process alive.
    """
    done = threading.Event()

    def run() -> None:
        try:
            action()
        except Exception:
            return
        done.set()

    threading.Thread(target=run, name="leaving", daemon=True).start()
    return done.wait(seconds)
