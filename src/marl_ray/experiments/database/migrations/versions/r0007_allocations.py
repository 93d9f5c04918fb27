"""Weights that Thompson sampling sets, and the time at which it set them."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("experiments", sa.Column("allocation", sa.JSON))
