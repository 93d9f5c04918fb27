"""Migrations (Alembic) that bring the store's schema up to date when a store is opened to be written."""

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from marl_ray.errors import MarlRayError

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

VERSION_TABLE = "marl_ray_experiments_version"
"""Not Alembic's default: an MLflow server may keep its own in the same database."""
_LOCK = 0x6D61_726C
"""Key of PostgreSQL's advisory lock that lets one process migrate at a time."""


def upgrade(writer: sa.Engine) -> None:
    """Bring the database to the newest schema in one transaction, one process at a time.

    `writer` must begin its SQLite transactions with BEGIN IMMEDIATE. Raises MarlRayError if the database was made by a
    newer marl-ray, and SQLAlchemyError.
    """
    from alembic import command

    config, scripts = _read_scripts()
    with writer.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        if _read_revision(connection, scripts) == scripts.get_current_head():
            return
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_revision(connection: sa.Connection) -> None:
    """Raise MarlRayError unless the database has the newest schema. It is only read."""
    _, scripts = _read_scripts()
    revision = _read_revision(connection, scripts)
    if revision != scripts.get_current_head():
        state = "it has no experiments" if revision is None else f"its revision {revision} is of an older marl-ray"
        raise MarlRayError(
            f"database: {state}; expected {scripts.get_current_head()}, which a gateway of this version makes when it starts"
        )


def _read_scripts() -> "tuple[Config, ScriptDirectory]":
    """Return Alembic's config and the migrations of this folder."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config, ScriptDirectory.from_config(config)


def _read_revision(connection: sa.Connection, scripts: "ScriptDirectory") -> str | None:
    """Return the revision of the database's schema; None of a database without one.

    Raises MarlRayError if a newer marl-ray has made it.
    """
    from alembic.runtime.migration import MigrationContext

    revision = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise MarlRayError(
            f"database: revision {revision} is of a newer marl-ray; expected {scripts.get_current_head()}"
        )
    return revision
