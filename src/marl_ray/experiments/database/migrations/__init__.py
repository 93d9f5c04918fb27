"""Migrations (Alembic) that bring the store's schema up to date when a store is opened."""

from pathlib import Path

import sqlalchemy as sa

from marl_ray.errors import MarlRayError

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
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    with writer.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        revision = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
        if revision == scripts.get_current_head():
            return
        if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
            raise MarlRayError(
                f"database: revision {revision} is of a newer marl-ray; expected {scripts.get_current_head()}"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
