"""Replies of judges and the sum of their cost, in memory or in a SQLite file that all workers share."""

import logging
import sqlite3
import threading

from marl_ray.errors import MarlRayError, one_line

log = logging.getLogger(__name__)

_WAIT_S = 10.0
"""Seconds to wait, at most, for another process that writes to the same file."""


class JudgeLedger:
    """Replies by key, and the sum of what was spent. Safe to use from several threads and processes.

    A file that fails later (disk full, locked for too long) loses replies, but no cost: this process adds it to its next.
    """

    def __init__(self, path: str | None = None):
        """Raise MarlRayError if the file cannot be opened."""
        self._lock, self._unwritten = threading.Lock(), 0.0
        try:
            self._base = sqlite3.connect(path or ":memory:", timeout=_WAIT_S, check_same_thread=False)
            with self._base:
                self._base.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
                self._base.execute("CREATE TABLE IF NOT EXISTS spending (id INTEGER PRIMARY KEY, spent REAL NOT NULL)")
                self._base.execute("INSERT OR IGNORE INTO spending VALUES (0, 0)")
        except sqlite3.Error as error:
            raise MarlRayError(f"cache: {path} cannot be opened as SQLite ({one_line(error)})") from error

    def get(self, key: str) -> str | None:
        """Return the reply that was put under the key."""
        try:
            with self._lock:
                row = self._base.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            log.warning("cache: cannot be read (%s)", one_line(error))
            return None
        return row[0] if row else None

    def put(self, key: str, reply: str) -> None:
        """Keep a reply."""
        try:
            with self._lock, self._base:
                self._base.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            log.warning("cache: cannot be written (%s)", one_line(error))

    def spend(self, amount: float) -> None:
        """Add to what all processes have spent."""
        with self._lock:
            self._unwritten += amount
            try:
                with self._base:
                    self._base.execute("UPDATE spending SET spent = spent + ?", (self._unwritten,))
                self._unwritten = 0.0
            except sqlite3.Error as error:
                log.warning("cache: spending cannot be written (%s)", one_line(error))

    def spent(self) -> float:
        """Return the sum of what all processes have spent.

        Raises MarlRayError if the file cannot be read: no limit would hold.
        """
        try:
            with self._lock:
                return float(self._base.execute("SELECT spent FROM spending").fetchone()[0]) + self._unwritten
        except sqlite3.Error as error:
            raise MarlRayError(f"cache: spending cannot be read ({one_line(error)})") from error
