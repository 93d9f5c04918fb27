"""Windows of outcomes: when exposures, outcomes and metrics were written, by the database's clock; and corrections."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # Values from before there were windows counted whenever they came, and go on to count as if they had come at once.
    exposed = (
        "(SELECT first_at FROM exposures WHERE exposures.experiment = {0}.experiment AND exposures.unit = {0}.unit)"
    )
    for table, column, known in (
        ("exposures", "stored_at", "first_at"),
        ("outcomes", "arrived_at", exposed.format("outcomes")),
        ("unit_metrics", "arrived_at", exposed.format("unit_metrics")),
    ):
        op.add_column(table, sa.Column(column, sa.Float(53), nullable=False, server_default="0"))
        op.execute(f"UPDATE {table} SET {column} = {known}")  # noqa: S608
    # Units are summed when their windows end, in the order in which they were stored.
    op.create_index("exposures_as_stored", "exposures", ["experiment", "stored_at"])
    for table in ("outcomes", "unit_metrics"):
        # They are read unit by unit now.
        op.drop_index(f"{table}_as_written", table)
        if op.get_bind().dialect.name == "postgresql":
            op.drop_column(table, "tx")
    op.create_table(
        "corrections",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("experiment", sa.String(100), sa.ForeignKey("experiments.name"), nullable=False),
        sa.Column("unit", sa.String(256), nullable=False),
        sa.Column("metric", sa.String(100), nullable=False),
        sa.Column("old", sa.Float(53), nullable=False),
        sa.Column("new", sa.Float(53), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
    )
    op.create_index("corrections_of", "corrections", ["experiment", "id"])
