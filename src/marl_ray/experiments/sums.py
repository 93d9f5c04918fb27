"""Sums over an experiment's units, continued from look to look: what is stored already is read once per process.

Rows are never changed or deleted, so sums only need the rows written since. SQLite numbers rows as they are written. On
PostgreSQL a row bears its transaction's number (`tx`): below the oldest transaction still under way, everything is
there and is summed for good; what lies above is summed anew at every look, so that nothing is missed and nothing late.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from marl_ray.experiments import schema
from marl_ray.experiments.statistics import Summary


class Moments(NamedTuple):
    """Values: how many, their mean, and the sum of their squared deviations from it."""

    n: int
    mean: float
    squares: float

    def summary(self) -> Summary:
        if not self.n:
            return Summary(0, math.nan, 0.0)
        return Summary(self.n, self.mean, self.squares / (self.n - 1) if self.n > 1 else 0.0)


NONE = Moments(0, 0.0, 0.0)
Exposed = tuple[int, str, str]
"""Epoch, arm and cluster; the cluster is empty where units are assigned by themselves."""
Valued = tuple[str, int, str, str, bool]
"""Metric (or `outcome`), epoch, arm, cluster, and whether the units count: those of a block's washout do not."""


def merged(one: Moments, other: Moments) -> Moments:
    """The moments of both together (Chan, Golub, LeVeque 1979)."""
    n = one.n + other.n
    if not one.n or not other.n:
        return one if one.n else other
    gap = other.mean - one.mean
    mean = one.mean + gap * other.n / n
    return Moments(n, mean, one.squares + other.squares + gap**2 * one.n * other.n / n)


@dataclass(frozen=True, slots=True)
class Design:
    """What of an experiment's config the sums depend on."""

    randomize: str = "session"
    washout_s: float = 0.0
    block_s: float = 600.0


@dataclass
class Sums:
    """One experiment's sums, up to where they are final."""

    design: Design
    exposures: dict[Exposed, int] = field(default_factory=dict)
    values: dict[Valued, Moments] = field(default_factory=dict)
    upto: dict[str, int] = field(default_factory=dict)
    """Table -> position of the first row that is not in the sums."""

    def read(self, connection: sa.Connection, name: str) -> tuple[dict[Exposed, int], dict[Valued, Moments], bool]:
        """Continue the sums of the experiment. Returns what is known now, rows above `upto` included, to be read only;
        and whether any row has come."""
        exposures, values = dict[Exposed, int](), dict[Valued, Moments]()
        news = False
        # Outcomes before exposures: what comes in between then has exposures too many, never too few.
        for table in (schema.outcomes, schema.metrics, schema.exposures):
            dialect = connection.dialect.name
            start, end = self.upto.get(table.name, 0), _end(connection, table)
            if dialect == "sqlite" and start == end:
                continue
            # All rows before the first is added: an error half way must not count some twice.
            for row in connection.execute(_since(table, name, self.design, start, end, dialect)).all():
                news = True
                if table is schema.exposures:
                    exposed = (row.epoch, row.arm, row.cluster)
                    counts = self.exposures if row.settled else exposures
                    counts[exposed] = counts.get(exposed, 0) + row.rows
                else:
                    valued = (row.metric, row.epoch, row.arm, row.cluster, bool(row.counts))
                    moments = self.values if row.settled else values
                    found = Moments(row.n, float(row.mean), float(row.squares))
                    moments[valued] = merged(moments.get(valued, NONE), found)
            self.upto[table.name] = end
        if exposures:
            exposures = self.exposures | {key: n + self.exposures.get(key, 0) for key, n in exposures.items()}
        if values:
            values = self.values | {key: merged(self.values.get(key, NONE), m) for key, m in values.items()}
        return exposures or self.exposures, values or self.values, news


def _row(table: sa.Table, dialect: str) -> Any:
    return sa.literal_column(f"{table.name}.{'rowid' if dialect == 'sqlite' else 'tx'}", sa.BigInteger)


def _end(connection: sa.Connection, table: sa.Table) -> int:
    """The position up to which every row is there."""
    if connection.dialect.name == "sqlite":
        last = sa.select(sa.func.max(_row(table, "sqlite"))).select_from(table)
        return int(connection.execute(last).scalar() or 0) + 1
    oldest = sa.text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
    return int(connection.execute(oldest).scalar_one())


def _since(table: sa.Table, name: str, design: Design, start: int, end: int, dialect: str) -> Any:
    """Sums of the experiment's rows of the table from `start` on, apart for those before `end`."""
    units = schema.exposures
    row = _row(table, dialect)
    cluster = sa.literal("") if design.randomize == "session" else sa.func.coalesce(units.c.cluster, "")
    columns = [units.c.epoch, units.c.arm, cluster.label("cluster"), sa.case((row < end, 1), else_=0).label("settled")]
    of_rows = sa.and_(table.c.experiment == name, row >= start)
    if table is units:
        keys = sa.select(*columns).where(of_rows).cte("units").c
        return sa.select(*keys, sa.func.count().label("rows")).group_by(*keys)
    metric = table.c.metric if "metric" in table.c else sa.literal("outcome")
    columns += [metric.label("metric"), counts_of(design).label("counts"), table.c.value]
    found = sa.select(*columns).join_from(table, units, schema.same_unit(table)).where(of_rows).cte("units")
    return schema.moments(found, "metric", "epoch", "arm", "cluster", "counts", "settled")


def counts_of(design: Design) -> Any:
    """1 for an exposure whose values count, 0 for one in its block's washout."""
    if design.randomize != "switchback":
        return sa.literal(1)
    units = schema.exposures.c
    return sa.case((units.first_at - schema.block_begin(units.cluster) >= design.washout_s, 1), else_=0)
