"""Texts by key, in memory or in a SQLite file that several processes share."""

import logging
import sqlite3
import threading

from marl_ray.errors import MarlRayError, one_line

_log = logging.getLogger(__name__)


class StoredTexts:
    """Texts by key. Safe to use from several threads and processes.

    If the file fails later (disk full, locked for too long), `get` and `put` write a line to the log and do nothing.
    """

    def __init__(self, path: str | None = None, max_texts: int | None = None, wait_s: float = 10.0) -> None:
        """Open the file `path`, or a database in memory without one. Raises MarlRayError if the file cannot be opened.

        Of more than `max_texts` texts the oldest are deleted; None keeps all. Every call waits at most `wait_s` seconds
        for another process that writes to the same file.
        """
        self._max_texts, self._lock = max_texts, threading.Lock()
        try:
            self._database = sqlite3.connect(path or ":memory:", timeout=wait_s, check_same_thread=False)
            with self._database:
                self._create_tables()
        except sqlite3.Error as error:
            raise MarlRayError(f"cache: {path} cannot be opened as SQLite ({one_line(error)})") from error

    def _create_tables(self) -> None:
        self._database.execute("CREATE TABLE IF NOT EXISTS stored (key TEXT PRIMARY KEY, text TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it has none, or, with a line in the log, if the file cannot be read."""
        try:
            with self._lock:
                row = self._database.execute("SELECT text FROM stored WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            _log.warning("cache: cannot be read (%s)", one_line(error))
            return None
        return row[0] if row else None

    def put(self, key: str, text: str) -> None:
        """Store a text, in place of an older one of its key. A file that cannot be written is logged, and not raised."""
        try:
            with self._lock, self._database:
                # A replaced row gets a new rowid, one above the largest: rowids are the order of age.
                self._database.execute("INSERT OR REPLACE INTO stored VALUES (?, ?)", (key, text))
                if self._max_texts is not None:
                    newest_deleted = "(SELECT rowid FROM stored ORDER BY rowid DESC LIMIT 1 OFFSET ?)"
                    statement = f"DELETE FROM stored WHERE rowid <= {newest_deleted}"  # noqa: S608  it is made here
                    self._database.execute(statement, (self._max_texts,))
        except sqlite3.Error as error:
            _log.warning("cache: cannot be written (%s)", one_line(error))

    def __len__(self) -> int:
        """Return the number of texts."""
        with self._lock:
            return int(self._database.execute("SELECT count(*) FROM stored").fetchone()[0])
