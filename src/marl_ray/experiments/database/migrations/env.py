"""Alembic's entry point, which runs the migrations in the transaction of `upgrade`."""

from alembic import context

from marl_ray.experiments.database.migrations import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
