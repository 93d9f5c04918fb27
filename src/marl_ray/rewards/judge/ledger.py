"""Replies of judges and the sum of their cost, in memory or in a SQLite file that all workers share."""

import logging
import sqlite3

from typing_extensions import override

from marl_ray.errors import MarlRayError, one_line
from marl_ray.stored_files.stored_texts import StoredTexts

log = logging.getLogger(__name__)


class JudgeLedger(StoredTexts):
    """Replies by key, and the sum of what was spent. Safe to use from several threads and processes.

    A file that fails later (disk full, locked for too long) loses replies, but no cost: this process adds it to its next.
    """

    def __init__(self, path: str | None = None) -> None:
        """Open the file `path`, or a ledger in memory without one. Raises MarlRayError if the file cannot be opened."""
        super().__init__(path)
        self._unwritten = 0.0
        """Cost that could not be written yet."""

    @override
    def _create_tables(self) -> None:
        super()._create_tables()
        self._database.execute("CREATE TABLE IF NOT EXISTS spending (id INTEGER PRIMARY KEY, spent REAL NOT NULL)")
        self._database.execute("INSERT OR IGNORE INTO spending VALUES (0, 0)")

    def spend(self, cost: float) -> None:
        """Add a cost, in the unit of the judge's prices, to what all processes have spent."""
        with self._lock:
            self._unwritten += cost
            try:
                with self._database:
                    self._database.execute("UPDATE spending SET spent = spent + ?", (self._unwritten,))
                self._unwritten = 0.0
            except sqlite3.Error as error:
                log.warning("cache: spending cannot be written (%s)", one_line(error))

    def spent(self) -> float:
        """Return the sum of what all processes have spent.

        Raises MarlRayError if the file cannot be read: no limit would hold.
        """
        try:
            with self._lock:
                return float(self._database.execute("SELECT spent FROM spending").fetchone()[0]) + self._unwritten
        except sqlite3.Error as error:
            raise MarlRayError(f"cache: spending cannot be read ({one_line(error)})") from error
