"""A lock that shows that a thread waits for it."""

import threading
from types import ModuleType, SimpleNamespace

import pytest
from waiting import until


class WatchedLock:
    """Takes the place of a `threading.Lock` in a `with` statement."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting_threads: set[int] = set()

    def __enter__(self) -> None:
        self._waiting_threads.add(threading.get_ident())
        self._lock.acquire()
        self._waiting_threads.discard(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for_waiter(self) -> None:
        """Wait until another thread waits for the lock, which the caller holds."""
        until(lambda: self._waiting_threads, "a thread that waits for the lock")


def watch_lock(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> WatchedLock:
    """Return the lock that an object of the module, whose only lock it is, gets from now on."""
    lock = WatchedLock()
    monkeypatch.setattr(module, "threading", SimpleNamespace(Lock=lambda: lock))
    return lock
