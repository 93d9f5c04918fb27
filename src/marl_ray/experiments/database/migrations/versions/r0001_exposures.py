"""Experiments, exposures and outcomes. Databases older than the migrations have exactly these tables."""

import sqlalchemy as sa
from alembic import op

from marl_ray.errors import MarlRayError

revision = "0001"
down_revision = None


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if not inspector.has_table("experiments"):
        op.create_table(
            "experiments",
            sa.Column("name", sa.String(100), primary_key=True),
            sa.Column("config", sa.JSON, nullable=False),
            sa.Column("epoch", sa.Integer, nullable=False),
            sa.Column("created", sa.Float, nullable=False),
        )
    elif {column["name"] for column in inspector.get_columns("experiments")} != {"name", "config", "epoch", "created"}:
        raise MarlRayError("database: its table 'experiments' is another program's; expected a database of its own")
    if not inspector.has_table("exposures"):
        op.create_table(
            "exposures",
            sa.Column("experiment", sa.String(100), sa.ForeignKey("experiments.name"), primary_key=True),
            sa.Column("unit", sa.String(256), primary_key=True),
            sa.Column("arm", sa.String(100), nullable=False),
            sa.Column("epoch", sa.Integer, nullable=False),
            sa.Column("propensity", sa.Float(53), nullable=False),
            sa.Column("first_at", sa.Float(53), nullable=False),
        )
    if not inspector.has_table("outcomes"):
        op.create_table(
            "outcomes",
            sa.Column("experiment", sa.String(100), primary_key=True),
            sa.Column("unit", sa.String(256), primary_key=True),
            sa.Column("value", sa.Float(53), nullable=False),
            sa.Column("at", sa.Float(53), nullable=False),
            sa.ForeignKeyConstraint(["experiment", "unit"], ["exposures.experiment", "exposures.unit"]),
        )
