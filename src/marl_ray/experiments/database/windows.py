"""Windows of outcomes, which run by the database's clock, because all hosts share it.

A unit's window begins when its exposure is stored: a tenth of a second after its act, or hours after it if the database
was away. A client's outcomes are refused as long as it is away, so the time to send them begins then. A report counts
if it arrives before the window ends. A unit can be judged once no report that arrived in time can still be under way:

- A writer reads the clock within its transaction. On PostgreSQL the transaction has its number by then, so a later reader
  sees that it is open, and judges only units whose windows ended before the oldest open transaction began.
- SQLite has one writer at a time, and does not say whether it is at work. There a unit is judged `GRACE_S` after its window.
  On both databases this also covers a clock that is put back by less.
"""

import time
from typing import NamedTuple

import sqlalchemy as sa

from marl_ray.experiments.database import schema

WINDOW_S = 600.0
"""Window of experiments whose stored config names none, in seconds."""
GRACE_S = 1.0
"""Seconds after a window until its unit is judged.

The wait is longer than any SQLite transaction takes from its reading of the clock to its end.
"""


def grace_s(window_s: float) -> float:
    """Return the seconds between the end of a unit's window and its judgement.

    The wait is `GRACE_S`, but never longer than the window.
    """
    return min(GRACE_S, window_s)


def arrival(connection: sa.Connection) -> float:
    """Return the moment (seconds since 1970) for everything that the transaction writes from now on."""
    if connection.dialect.name == "sqlite":
        return time.time()
    # The transaction must be visible before it reads the clock, so the number comes first.
    row = connection.execute(
        sa.text("SELECT pg_current_xact_id()::text, extract(epoch FROM clock_timestamp())::float8")
    )
    return float(row.one()[1])


def settled_at(connection: sa.Connection) -> float:
    """Return the latest moment by which everything that arrived is visible to later transactions.

    The moment is in seconds since 1970. Transactions of other users may be invisible here, and then count as over.
    """
    if connection.dialect.name == "sqlite":
        return time.time()
    oldest = (
        "SELECT extract(epoch FROM least(clock_timestamp(), min(xact_start)))::float8 FROM pg_stat_activity "
        "WHERE backend_xid IS NOT NULL AND datname = current_database()"
    )
    return float(connection.execute(sa.text(oldest)).scalar_one())


class ReportRules(NamedTuple):
    """Rules of an experiment for the values that units report."""

    window_s: float
    """Seconds after a unit's exposure in which its values count."""
    bounds: dict[str, tuple[float, float]]
    """Metric (or `outcome`) -> (low, high); values outside are refused."""


def report_rules_of(connection: sa.Connection, experiment: str) -> ReportRules:
    """Return the rules in the experiment's stored config."""
    experiments = schema.experiments.c
    config = connection.execute(sa.select(experiments.config).where(experiments.name == experiment)).scalar_one()
    limits = {rail["name"]: rail.get("bounds") for rail in config.get("guardrails", ())} | {
        "outcome": config.get("bounds")
    }
    bounds = {metric: (float(limit[0]), float(limit[1])) for metric, limit in limits.items() if limit}
    return ReportRules(float(config.get("outcome_window_s", WINDOW_S)), bounds)
