"""The database's tables as queries see them; migrations/ makes them.

All times are seconds since 1970. `stored_at` and `arrived_at` are of the database's own clock (`Database.arrival`), which
alone decides what is in time; the others are of the clocks of those who report or change something.
"""

from typing import Any

import sqlalchemy as sa

from marl_ray.experiments.assignment.rendezvous import BLOCK_START_LENGTH

metadata = sa.MetaData()
experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("config", sa.JSON),
    sa.Column("epoch", sa.Integer),
    sa.Column("created", sa.Float),
    sa.Column("status", sa.String(20)),
    sa.Column("stage", sa.Integer),
    sa.Column("stage_since", sa.Float(53)),
    sa.Column("stage_epoch", sa.Integer),
    sa.Column("winner", sa.String(100)),
    sa.Column("endpoint", sa.String(100)),
    sa.Column("revision", sa.Integer),
    sa.Column("allocation", sa.JSON(none_as_null=True)),
)
"""One row per experiment: its config, and where its ramp stands.

`stage` counts from 0, since the time `stage_since` and the epoch `stage_epoch`; `revision` rises with each change of the
config; `allocation` holds the weights that replace the stage's.
"""
arms = sa.Table(
    "arms",
    metadata,
    sa.Column("experiment", sa.String(100), primary_key=True),
    sa.Column("arm", sa.String(100), primary_key=True),
    sa.Column("digest", sa.String(200)),
    sa.Column("weights_sha256", sa.String(64)),
    sa.Column("rolled_back_at", sa.Float(53)),
    sa.Column("reason", sa.Text),
)
"""One row per arm and experiment: its bundle, and when and why it was rolled back, null if it was not."""
exposures = sa.Table(
    "exposures",
    metadata,
    sa.Column("experiment", sa.String(100), primary_key=True),
    sa.Column("unit", sa.String(256), primary_key=True),
    sa.Column("arm", sa.String(100)),
    sa.Column("epoch", sa.Integer),
    sa.Column("propensity", sa.Float(53)),
    sa.Column("first_at", sa.Float(53)),
    sa.Column("cluster", sa.String(256)),
    sa.Column("stored_at", sa.Float(53)),
)
"""One row per unit: the arm that it was assigned to at `first_at`, and the chance of that, `propensity`, in (0, 1]."""


def _report_table(table: str, *more: sa.Column[Any]) -> sa.Table:
    """Define a table of reported values: one value per unit and combination of the keys in `more`."""
    return sa.Table(
        table,
        metadata,
        sa.Column("experiment", sa.String(100), primary_key=True),
        sa.Column("unit", sa.String(256), primary_key=True),
        *more,
        sa.Column("value", sa.Float(53)),
        sa.Column("at", sa.Float(53)),
        sa.Column("arrived_at", sa.Float(53)),
    )


outcomes = _report_table("outcomes")
"""One row per unit that has reported its outcome, which came about at `at`."""
metrics = _report_table("unit_metrics", sa.Column("metric", sa.String(100), primary_key=True))
"""One row per unit and metric, as `outcomes`."""
corrections = sa.Table(
    "corrections",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("experiment", sa.String(100)),
    sa.Column("unit", sa.String(256)),
    sa.Column("metric", sa.String(100)),
    sa.Column("old", sa.Float(53)),
    sa.Column("new", sa.Float(53)),
    sa.Column("at", sa.Float(53)),
    sa.Column("actor", sa.String(200)),
)
"""One row per value that replaced another one at `at`."""
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("experiment", sa.String(100)),
    sa.Column("at", sa.Float(53)),
    sa.Column("actor", sa.String(200)),
    sa.Column("action", sa.String(40)),
    sa.Column("arm", sa.String(100)),
    sa.Column("reason", sa.Text),
    sa.Column("epoch", sa.Integer),
    sa.Column("before", sa.JSON(none_as_null=True)),
    sa.Column("after", sa.JSON),
)
"""One row per change of an experiment, never changed: see `store.records.AuditEntry`."""
SHADOW_COUNTS = ("acts", "errors", "dropped", "decisions", "agreed", "tokens")
"""Columns of `shadow_totals` with counts (see `UnitStore.record_shadows`)."""
SHADOW_SUMS = ("seconds", "log_prob", "served_log_prob")
"""Columns of `shadow_totals` with sums of real numbers."""
shadow_totals = sa.Table(
    "shadow_totals",
    metadata,
    sa.Column("experiment", sa.String(100), primary_key=True),
    sa.Column("arm", sa.String(100), primary_key=True),
    sa.Column("replica", sa.String(100), primary_key=True),
    *(sa.Column(name, sa.BigInteger) for name in SHADOW_COUNTS),
    *(sa.Column(name, sa.Float(53)) for name in SHADOW_SUMS),
    sa.Column("at", sa.Float(53)),
)
"""One row per shadow arm and replica: its sums so far, last written at `at`."""
notices = sa.Table(
    "notices",
    metadata,
    sa.Column("audit_id", sa.Integer, primary_key=True),
    sa.Column("attempts", sa.Integer),
    sa.Column("next_at", sa.Float(53)),
    sa.Column("delivered_at", sa.Float(53)),
)
"""One row per notice about an entry of `audit`: the attempts to deliver it, and when the next one is due."""
preloads = sa.Table(
    "preloads",
    metadata,
    sa.Column("reference", sa.String(1000), primary_key=True),
    sa.Column("at", sa.Float(53)),
)
"""One row per bundle that all replicas are asked to load ahead of its experiment, at the time of the last request."""


def same_unit(table: sa.Table) -> Any:
    """Return the SQL condition that the row belongs to the exposure."""
    return sa.and_(*(table.c[key] == exposures.c[key] for key in ("experiment", "unit")))


def block_begin(block: object) -> Any:
    """Return the SQL for the start of a block (`rendezvous.block_of`), in seconds since 1970."""
    return sa.cast(sa.func.substr(block, 1, BLOCK_START_LENGTH), sa.Float(53))


def moments(units: sa.CTE, *keys: str) -> Any:
    """Return a query of the moments of `units`, with one row per combination of `keys`.

    `units` has the columns `keys` and `value`, which may be null. A row has the keys, `rows`, and of the values `n`, `mean`,
    `squares`, the sum of their squared deviations from the mean, `low` and `high`.
    """
    grouped = [units.c[key] for key in keys]
    # Deviations from the mean: a sum of raw squares loses all digits where the mean is large.
    deviation = units.c.value - sa.func.avg(units.c.value).over(partition_by=grouped)
    rows = sa.select(*grouped, units.c.value, deviation.label("deviation")).subquery()
    values = [
        sa.func.count().label("rows"),
        sa.func.count(rows.c.value).label("n"),
        sa.func.avg(rows.c.value).label("mean"),
        sa.func.sum(rows.c.deviation * rows.c.deviation).label("squares"),
        sa.func.min(rows.c.value).label("low"),
        sa.func.max(rows.c.value).label("high"),
    ]
    by = [rows.c[key] for key in keys]
    return sa.select(*by, *values).group_by(*by)
