"""Arms know what weights they have, so that weights that have been rolled back are known under any name."""

import sqlalchemy as sa
from alembic import op

from marl_ray.experiments.database.migrations.versions.r0002_states import refuse

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # The weights of existing arms are unknown until their experiment is opened again; their bundles' digests bar them.
    op.add_column("arms", sa.Column("weights_sha256", sa.String(64)))
    op.create_index("arms_of_weights", "arms", ["weights_sha256"])
    changed = "COALESCE(NEW.weights_sha256, '') <> OLD.weights_sha256"
    condition = f"WHEN (OLD.rolled_back_at IS NOT NULL AND {changed})"
    refuse("arms_keep_weights", "UPDATE", "arms", condition, "a rolled-back arm stays rolled back")
