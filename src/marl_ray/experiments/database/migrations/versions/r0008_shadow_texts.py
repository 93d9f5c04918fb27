"""Tokens and log-probabilities of served texts under shadowed language models."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("shadow_totals", sa.Column("tokens", sa.BigInteger))
    for name in ("log_prob", "served_log_prob"):
        op.add_column("shadow_totals", sa.Column(name, sa.Float(53)))
