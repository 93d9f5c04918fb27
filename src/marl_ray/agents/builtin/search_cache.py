"""A bounded cache of search responses, in memory or in a SQLite file."""

import logging
import sqlite3
import threading

from marl_ray.errors import MarlRayError, one_line

log = logging.getLogger(__name__)

_WAIT_S = 5.0
"""Seconds to wait, at most, for another process that writes to the same file."""


class SearchCache:
    """Texts by key, at most `entries` of them: the oldest go first. Safe to use from several threads and processes.

    A store that fails later (disk full, locked for too long) finds and keeps nothing; MarlRayError if it cannot be opened.
    """

    def __init__(self, path: str | None = None, entries: int = 10_000):
        self._entries, self._lock = entries, threading.Lock()
        try:
            self._base = sqlite3.connect(path or ":memory:", timeout=_WAIT_S, check_same_thread=False)
            with self._base:
                self._base.execute("CREATE TABLE IF NOT EXISTS stored (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
        except sqlite3.Error as error:
            raise MarlRayError(f"cache: {path} cannot be opened as SQLite ({one_line(error)})") from error

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it has none, or, with a line in the log, if the file cannot be read."""
        try:
            with self._lock:
                row = self._base.execute("SELECT text FROM stored WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            log.warning("cache: cannot be read (%s)", one_line(error))
            return None
        return row[0] if row else None

    def put(self, key: str, text: str) -> None:
        """Store a text, in place of an older one of its key. A file that cannot be written is logged, and not raised."""
        try:
            with self._lock, self._base:
                # A replaced row gets a new rowid, one above the largest: rowids are the order of age.
                self._base.execute("INSERT OR REPLACE INTO stored VALUES (?, ?)", (key, text))
                last = "(SELECT rowid FROM stored ORDER BY rowid DESC LIMIT 1 OFFSET ?)"
                self._base.execute(f"DELETE FROM stored WHERE rowid <= {last}", (self._entries,))  # noqa: S608
        except sqlite3.Error as error:
            log.warning("cache: cannot be written (%s)", one_line(error))

    def __len__(self) -> int:
        with self._lock:
            return int(self._base.execute("SELECT count(*) FROM stored").fetchone()[0])
