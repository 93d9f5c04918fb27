"""States, arms with their marks, named metrics, and the audit. Running experiments continue as they were."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_REFUSALS = {
    "audit_no_update": ("UPDATE", "audit", "", "the audit is append-only"),
    "audit_no_delete": ("DELETE", "audit", "", "the audit is append-only"),
    "arms_keep_mark": (
        "UPDATE",
        "arms",
        "WHEN (OLD.rolled_back_at IS NOT NULL AND (NEW.rolled_back_at IS NULL OR NEW.digest <> OLD.digest))",
        "a rolled-back arm stays rolled back",
    ),
    "arms_keep_marked": (
        "DELETE",
        "arms",
        "WHEN (OLD.rolled_back_at IS NOT NULL)",
        "a rolled-back arm stays rolled back",
    ),
}
"""Trigger -> event, table, condition, message of the changes that the database refuses to everybody."""


def upgrade() -> None:
    for column in (
        sa.Column("status", sa.String(20), nullable=False, server_default="running"),
        sa.Column("stage", sa.Integer, nullable=False, server_default="0"),
        sa.Column("stage_since", sa.Float(53), nullable=False, server_default="0"),
        sa.Column("stage_epoch", sa.Integer, nullable=False, server_default="1"),
        sa.Column("winner", sa.String(100)),
    ):
        op.add_column("experiments", column)
    op.execute("UPDATE experiments SET stage_since = created, stage_epoch = epoch")
    arms = op.create_table(
        "arms",
        sa.Column("experiment", sa.String(100), sa.ForeignKey("experiments.name"), primary_key=True),
        sa.Column("arm", sa.String(100), primary_key=True),
        sa.Column("digest", sa.String(200), nullable=False),
        sa.Column("rolled_back_at", sa.Float(53)),
        sa.Column("reason", sa.Text),
    )
    op.create_table(
        "unit_metrics",
        sa.Column("experiment", sa.String(100), primary_key=True),
        sa.Column("unit", sa.String(256), primary_key=True),
        sa.Column("metric", sa.String(100), primary_key=True),
        sa.Column("value", sa.Float(53), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["experiment", "unit"], ["exposures.experiment", "exposures.unit"]),
    )
    audit = op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("experiment", sa.String(100), sa.ForeignKey("experiments.name"), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("arm", sa.String(100)),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON, nullable=False),
    )
    op.create_index("audit_of", "audit", ["experiment", "id"])
    op.create_index("arms_of_bundle", "arms", ["digest"])
    op.create_index("exposures_of_stage", "exposures", ["experiment", "epoch", "arm"])
    op.create_index("outcomes_in_order", "outcomes", ["experiment", "at", "unit"])
    experiments = sa.table(
        "experiments", sa.column("name"), sa.column("config", sa.JSON), sa.column("epoch"), sa.column("created")
    )
    for row in op.get_bind().execute(sa.select(experiments)).all():
        parts = row.config["arms"].items()
        rows = [{"experiment": row.name, "arm": arm, "digest": part["digest"]} for arm, part in parts]
        op.get_bind().execute(sa.insert(arms), rows)
        entry = {
            "experiment": row.name,
            "at": time.time(),
            "actor": "migration",
            "action": "open",
            "reason": "taken over from a database without an audit",
            "epoch": row.epoch,
            "after": {"status": "running", "config": row.config},
        }
        op.get_bind().execute(sa.insert(audit).values(entry))
    for name, refusal in _REFUSALS.items():
        refuse(name, *refusal)


def refuse(name: str, event: str, table: str, condition: str, message: str) -> None:
    """Let the database refuse an event on a table, with this message, where the condition holds."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} {condition} BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
        return
    op.execute(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{message}'; END $$"
    )
    op.execute(f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW {condition} EXECUTE FUNCTION {name}()")
