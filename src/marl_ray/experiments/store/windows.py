"""Windows of outcomes, and the clock they run by: the database's, which is the same for all hosts.

A unit's window begins when its exposure is stored. That is a tenth of a second after it acted, and hours after when the
database was away meanwhile: a client's outcomes are refused as long, so its time to send them begins then. What a unit
reports counts if it arrives before the window ends. For a unit to be judged, nothing may still be on its way that arrived
in time:

- Who writes reads the clock within its transaction. On PostgreSQL it has its transaction's number by then, so whoever reads
  later sees the transaction under way, and judges only units whose windows ended before the oldest of these began.
- SQLite has one writer at a time, and does not say whether it is at work. There a unit is judged `GRACE_S` after its window.
  It covers, on both, a clock that is put back by less.
"""

import time
from typing import NamedTuple

import sqlalchemy as sa

from marl_ray.experiments.store import schema

WINDOW_S = 600.0
"""Window of experiments whose stored config names none, in seconds."""
GRACE_S = 1.0
"""Seconds after a window until its unit is judged; longer than any SQLite transaction between its clock reading and its
end."""


def grace_s(window_s: float) -> float:
    """Seconds between the end of a unit's window and its judgement: `GRACE_S`, but never more than the window."""
    return min(GRACE_S, window_s)


def arrival(connection: sa.Connection) -> float:
    """The moment (seconds since 1970) for everything that the transaction writes from now on."""
    if connection.dialect.name == "sqlite":
        return time.time()
    # In this order: the transaction must be seen before it has a time.
    row = connection.execute(
        sa.text("SELECT pg_current_xact_id()::text, extract(epoch FROM clock_timestamp())::float8")
    )
    return float(row.one()[1])


def settled_at(connection: sa.Connection) -> float:
    """The latest moment (seconds since 1970) such that everything that arrived earlier is visible to transactions that
    begin later. Transactions of other users may be invisible here, and then count as over."""
    if connection.dialect.name == "sqlite":
        return time.time()
    oldest = (
        "SELECT extract(epoch FROM least(clock_timestamp(), min(xact_start)))::float8 FROM pg_stat_activity "
        "WHERE backend_xid IS NOT NULL AND datname = current_database()"
    )
    return float(connection.execute(sa.text(oldest)).scalar_one())


class Terms(NamedTuple):
    """Rules of an experiment for the values that units report."""

    window_s: float
    """Seconds after a unit's exposure in which its values count."""
    bounds: dict[str, tuple[float, float]]
    """Metric (or `outcome`) -> (low, high); values outside are refused."""


def terms_of(connection: sa.Connection, experiment: str) -> Terms:
    """The terms in the experiment's stored config."""
    here = schema.experiments.c
    config = connection.execute(sa.select(here.config).where(here.name == experiment)).scalar_one()
    limits = {rail["name"]: rail.get("bounds") for rail in config.get("guardrails", ())} | {
        "outcome": config.get("bounds")
    }
    bounds = {metric: (float(of[0]), float(of[1])) for metric, of in limits.items() if of}
    return Terms(float(config.get("outcome_window_s", WINDOW_S)), bounds)
