"""The one door to MLflow: a client whose database, if it is a SQLite file, is complete.

MLflow makes the tables of a new database in forty migrations without a lock. Two processes that begin at once, or one that
is killed meanwhile, leave a file that nobody can open ("table secrets already exists"). Here the tables are made elsewhere,
and come into the file in one transaction of SQLite, which locks out others and is rolled back if its process dies.
"""

import contextlib
import logging
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.temporary_folders import temporary_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient


LOCK_S = 60.0
"""Maximum seconds to wait for another process that fills the file."""


def mlflow_client(uri: str, reads: bool = False) -> "MlflowClient":
    """Return a client of the tracking server and registry at `uri`.

    A SQLite file is made, or mended if it was left half made; for a client that only `reads` a missing file is a
    FileNotFoundError. Raises what MLflow raises, or sqlite3.Error and OSError where the file cannot be made.
    """
    path = _file_of(uri)
    if reads and path is not None and not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    import mlflow

    # This logger announces every table that MLflow makes, and prints a traceback of each error, which is raised besides.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if path is not None and not _is_complete(path):
        with temporary_folder("mlflow") as folder:
            template = folder / "mlflow.db"
            mlflow.MlflowClient(*[f"sqlite:///{template}"] * 2).search_experiments()
            _fill(path, template)
    return mlflow.MlflowClient(uri, registry_uri=uri)


def _file_of(uri: str) -> Path | None:
    """Return the file of a SQLite database; None for every other database or server."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(uri)
    except (ArgumentError, ValueError):
        return None
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def _is_complete(path: Path) -> bool:
    """Return True if the database holds an experiment: MLflow makes the first when all tables are there.

    A file of something else counts as complete, and MLflow says so.
    """
    if not path.exists():
        return False
    with contextlib.closing(sqlite3.connect(path, timeout=LOCK_S)) as database:
        return _has_experiments(database)


def _has_experiments(database: sqlite3.Connection) -> bool:
    try:
        return database.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is not None
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return False
        raise
    except sqlite3.DatabaseError:  # it is no database
        return True


def _fill(path: Path, template: Path) -> None:
    """Give the database the content of the template, unless it is complete by now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.closing(sqlite3.connect(template)) as source,
        contextlib.closing(sqlite3.connect(path, timeout=LOCK_S, isolation_level=None)) as target,
    ):
        target.execute("PRAGMA foreign_keys = OFF")
        target.execute("BEGIN EXCLUSIVE")  # an error or a death rolls it back
        if _has_experiments(target):
            return
        for kind, name in target.execute(
            "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
        ).fetchall():
            target.execute(f'DROP {kind} IF EXISTS "{name}"')
        for statement in source.iterdump():
            if statement not in ("BEGIN TRANSACTION;", "COMMIT;"):
                target.execute(statement)
        target.execute("COMMIT")
