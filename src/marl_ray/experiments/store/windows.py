"""The clock that windows run by: the database's, which is one for all hosts.

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
"""Of experiments whose stored config names none."""
GRACE_S = 1.0
"""Longer than a transaction of SQLite's lasts between reading the clock and its end."""


def grace_s(window_s: float) -> float:
    """How long after its window a unit is judged: a second, and no longer than the window."""
    return min(GRACE_S, window_s)


def arrival(connection: sa.Connection) -> float:
    """Seconds since 1970, for what the transaction writes from now on."""
    if connection.dialect.name == "sqlite":
        return time.time()
    # In this order: the transaction must be seen before it has a time.
    row = connection.execute(
        sa.text("SELECT pg_current_xact_id()::text, extract(epoch FROM clock_timestamp())::float8")
    )
    return float(row.one()[1])


def settled_at(connection: sa.Connection) -> float:
    """Seconds since 1970: all that arrived before is there for transactions that begin after this one. Transactions of
    other users may be hidden from this one's, and then count as over."""
    if connection.dialect.name == "sqlite":
        return time.time()
    oldest = (
        "SELECT extract(epoch FROM least(clock_timestamp(), min(xact_start)))::float8 FROM pg_stat_activity "
        "WHERE backend_xid IS NOT NULL AND datname = current_database()"
    )
    return float(connection.execute(sa.text(oldest)).scalar_one())


class Terms(NamedTuple):
    """What an experiment says of the values that units report."""

    window_s: float
    """Seconds after a unit's exposure in which its values count."""
    bounds: dict[str, tuple[float, float]]
    """Metric (or `outcome`) -> the numbers outside of which its values are refused."""


def terms_of(connection: sa.Connection, experiment: str) -> Terms:
    """The terms in the experiment's stored config."""
    here = schema.experiments.c
    config = connection.execute(sa.select(here.config).where(here.name == experiment)).scalar_one()
    told = {rail["name"]: rail.get("bounds") for rail in config.get("guardrails", ())} | {
        "outcome": config.get("bounds")
    }
    bounds = {metric: (float(of[0]), float(of[1])) for metric, of in told.items() if of}
    return Terms(float(config.get("outcome_window_s", WINDOW_S)), bounds)
