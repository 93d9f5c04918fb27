"""Clusters of units, endpoints, totals of shadowed traffic, and an order of rows that sums can be continued from."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

SUMMED = ("exposures", "outcomes", "unit_metrics")


def upgrade() -> None:
    op.add_column("exposures", sa.Column("cluster", sa.String(256)))
    op.add_column("experiments", sa.Column("endpoint", sa.String(100)))
    op.add_column("experiments", sa.Column("revision", sa.Integer, nullable=False, server_default="1"))
    op.execute("UPDATE experiments SET endpoint = name")
    op.create_index("experiments_of_endpoint", "experiments", ["endpoint"])
    op.create_table(
        "shadow_totals",
        sa.Column("experiment", sa.String(100), sa.ForeignKey("experiments.name"), primary_key=True),
        sa.Column("arm", sa.String(100), primary_key=True),
        sa.Column("replica", sa.String(100), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("acts", "errors", "dropped")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("decisions", "agreed")),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
    )
    # Sums are continued row by row, so nothing counts a stage's units in an index any more.
    op.drop_index("exposures_of_stage", "exposures")
    for table in SUMMED:
        columns = ["experiment"]  # which SQLite orders by row number
        if op.get_bind().dialect.name == "postgresql":
            # A row is there for everybody once every transaction up to its own is over.
            default = sa.text("(pg_current_xact_id()::text::bigint)")
            op.add_column(table, sa.Column("tx", sa.BigInteger, nullable=False, server_default=default))
            columns.append("tx")
        op.create_index(f"{table}_as_written", table, columns)
