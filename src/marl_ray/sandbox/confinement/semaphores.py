"""Replacement for the semaphores of `multiprocessing`, for a process that cannot have the real ones.

The standard library keeps them in /dev/shm, which no run may write. Its `ThreadPool`, queues and locks need
them even where only threads use them, so a run gets these, which live in its own memory.
"""

import contextlib
import importlib
import threading
from typing import Any


class SemLock:
    """The class of the C module `_multiprocessing`, as far as `multiprocessing.synchronize` uses it."""

    SEM_VALUE_MAX = 2**31 - 1  # of the C library on Linux
    _RECURSIVE = 0  # `kind` of a lock that its thread may take again; 1 is a semaphore

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool):
        self.kind = kind
        self.maxvalue = maxvalue
        self.name = None
        self.handle = 0
        self._value, self._changed = value, threading.Condition()
        self._owner_thread: int | None = None
        self._depth = 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take the semaphore. Return True if it was taken within `timeout` seconds."""
        thread = threading.get_ident()
        with self._changed:
            if self.kind == self._RECURSIVE and self._owner_thread == thread:
                self._depth += 1
                return True
            if not self._changed.wait_for(lambda: self._value > 0, timeout if block else 0):
                return False
            self._value -= 1
            self._owner_thread, self._depth = thread, self._depth + 1
            return True

    def release(self) -> None:
        """Give the semaphore back.

        Raises AssertionError for a recursive lock of another thread, ValueError if it was given back too often.
        """
        with self._changed:
            if self.kind == self._RECURSIVE:
                if self._owner_thread != threading.get_ident():
                    raise AssertionError("attempt to release recursive lock not owned by thread")
                self._depth -= 1
                if self._depth:
                    return
            else:
                if self._value >= self.maxvalue:
                    raise ValueError("semaphore or lock released too many times")
                self._depth -= 1
            self._owner_thread = None if self._depth <= 0 else self._owner_thread
            self._value += 1
            self._changed.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _count(self) -> int:
        return self._depth

    def _is_mine(self) -> bool:
        return self._depth > 0 and self._owner_thread == threading.get_ident()

    def _get_value(self) -> int:
        return self._value

    def _is_zero(self) -> bool:
        return self._value == 0

    def _after_fork(self) -> None:
        self._depth = 0


def install() -> None:
    """Replace the C module's semaphores by these, in this process and its forks."""
    with contextlib.suppress(ImportError):
        module: Any = importlib.import_module("_multiprocessing")
        module.SemLock, module.sem_unlink = SemLock, lambda name: None
