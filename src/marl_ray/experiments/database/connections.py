"""Connections to the database of experiments: transactions, a clock, and one error for all failures."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from marl_ray.errors import MarlRayError, one_line
from marl_ray.experiments.database import windows
from marl_ray.experiments.database.migrations import check_revision, upgrade
from marl_ray.json_types import JsonObject

BUSY_S = 10.0
"""Seconds that a write waits for another process's write."""
IDLE_TRANSACTION_S = 60.0
"""Seconds after which PostgreSQL ends a transaction whose client asks nothing."""
_OPEN_ATTEMPTS = 5
"""Attempts to open a database that others open at the same time."""


class StoreError(MarlRayError):
    """The database cannot be used; the caller is not at fault."""


class Database:
    """One open database, which the stores share. Safe to use from several threads, processes and machines."""

    def __init__(self, url: str, clock: Callable[[], float] | None = None, *, is_read_only: bool = False):
        """Connect to the database and bring its schema up to date.

        `clock` (seconds since 1970) replaces the database's clock, by which windows run; it is for simulations. With
        `is_read_only` nothing is made or changed, and the database refuses every write. Raises MarlRayError unless the
        URL is of a usable SQLite or PostgreSQL, and for a read-only one unless it is there and up to date.
        """
        self.clock = clock
        self._engine = _open_engine(url, is_read_only)
        is_sqlite = self._engine.dialect.name == "sqlite"
        self._writer = self._engine.execution_options(writes=True)
        # SQLite's transactions see one state of the rows by themselves.
        self._snapshots = (
            self._engine if is_sqlite else self._engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self.insert: Any = sqlite.insert if is_sqlite else postgresql.insert
        """The database's own INSERT, which has ON CONFLICT."""

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """Run the block in one transaction that reads. Raises StoreError if the database fails."""
        return _begin(self._engine)

    def write_transaction(self) -> AbstractContextManager[sa.Connection]:
        """Run the block in one transaction that takes the write lock as it begins.

        Raises StoreError if the database fails.
        """
        return _begin(self._writer)

    def snapshot(self) -> AbstractContextManager[sa.Connection]:
        """Run the block in one transaction whose queries all see the same rows.

        Raises StoreError if the database fails.
        """
        return _begin(self._snapshots)

    def arrival(self, connection: sa.Connection) -> float:
        """Return the moment (seconds since 1970) for everything that the transaction writes from now on."""
        return self.clock() if self.clock is not None else windows.arrival(connection)

    def settled_at(self) -> float:
        """Return the moment until which all that arrived is written, in seconds since 1970.

        See `windows.settled_at`.
        """
        if self.clock is not None:
            return self.clock()
        with self.transaction() as connection:
            return windows.settled_at(connection)


@contextmanager
def _begin(engine: sa.Engine) -> Iterator[sa.Connection]:
    try:
        with engine.begin() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise StoreError(f"experiment store: {one_line(error)}") from error


def _open_engine(url: str, is_read_only: bool) -> sa.Engine:
    """Connect to the database, and bring its schema up to date or, of a read-only one, check it.

    Connections with the execution option `writes` hold SQLite's write lock from their transaction's beginning. Raises
    MarlRayError as `Database` does.
    """
    try:
        parsed = sa.make_url(url)
    except SQLAlchemyError as error:
        raise MarlRayError(
            f"database: expected an SQLAlchemy URL such as sqlite:///runs/experiments.db, got {url!r}"
        ) from error
    kind = parsed.get_backend_name()
    shown = parsed.render_as_string(hide_password=True)
    if kind == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise MarlRayError("database: SQLite needs a file, such as sqlite:///runs/experiments.db")
        if is_read_only and not Path(parsed.database).exists():
            raise MarlRayError(f"database {shown!r} is not there; a gateway makes its database when it starts")
        arguments: JsonObject = {"timeout": BUSY_S}
    elif kind == "postgresql":
        # A transaction that its client has left must end, for no unit is judged meanwhile.
        waits = {"lock_timeout": BUSY_S, "idle_in_transaction_session_timeout": IDLE_TRANSACTION_S}
        options = " ".join(f"-c {name}={int(1000 * seconds)}" for name, seconds in waits.items())
        options += " -c default_transaction_read_only=on" if is_read_only else ""
        arguments = {"connect_timeout": int(BUSY_S), "options": options}
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
    else:
        raise MarlRayError(f"database: expected sqlite or postgresql, got {kind!r}")
    try:
        if kind == "sqlite" and not is_read_only:
            Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
        # A connection that the server has dropped is replaced before it fails a request.
        engine = sa.create_engine(parsed, connect_args=arguments, pool_timeout=BUSY_S, pool_pre_ping=True)
        if kind == "sqlite":
            sa.event.listen(engine, "connect", _set_up_sqlite_reader if is_read_only else _set_up_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        if is_read_only:
            with engine.begin() as connection:
                check_revision(connection)
        else:
            _upgrade(engine)
    except (SQLAlchemyError, OSError, ImportError) as error:
        raise MarlRayError(f"database {shown!r} cannot be opened: {one_line(error)}") from error
    return engine


def _upgrade(engine: sa.Engine) -> None:
    # SQLite refuses to switch to WAL while another process does, without waiting.
    for attempt in range(1, _OPEN_ATTEMPTS + 1):
        try:
            upgrade(engine.execution_options(writes=True))
            return
        except sa.exc.OperationalError:
            if attempt == _OPEN_ATTEMPTS:
                raise
            time.sleep(0.1 * attempt)


def _set_up_sqlite(connection: Any, _: Any) -> None:
    # Without this the driver begins transactions itself, late, and commits before changes of the schema.
    connection.isolation_level = None
    # WAL lets readers and the writer work at the same time; with it, NORMAL loses nothing when a process dies and at
    # most the last commits when the machine does.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _set_up_sqlite_reader(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only=ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and then wants to write fails at once if another has written in between.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
