"""Deliveries of changes to a webhook, and bundles that every replica loads ahead of their experiments."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("audit_id", sa.Integer, sa.ForeignKey("audit.id"), primary_key=True),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_at", sa.Float(53), nullable=False),
        sa.Column("delivered_at", sa.Float(53)),
    )
    op.create_table(
        "preloads",
        sa.Column("reference", sa.String(1000), primary_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
    )
