"""Sums over an experiment's units, continued from look to look: what is stored already is read once per process.

A unit enters the sums of values when its window is over, and nothing of it changes after that (`windows`). Two things
say that it is there for good and that it is due: the position of its row, and the moment it was stored. SQLite numbers
rows as they are written. On PostgreSQL a row bears its transaction's number (`tx`): below the oldest transaction still
under way everything is there and is summed for good; what lies above is summed anew at every look. So a look reads the
rows above the last position, and of those below it the units whose windows have ended since the last look: each unit
once, in whatever order transactions end and clocks run.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.store import schema
from marl_ray.experiments.store.windows import WINDOW_S, grace_s


class Moments(NamedTuple):
    """Values: how many, their mean, the sum of their squared deviations from it, the smallest and the largest."""

    n: int
    mean: float
    squares: float
    low: float = math.inf
    high: float = -math.inf

    def summary(self) -> Summary:
        if not self.n:
            return Summary(0, math.nan, 0.0)
        return Summary(self.n, self.mean, self.squares / (self.n - 1) if self.n > 1 else 0.0)


NONE = Moments(0, 0.0, 0.0)
Exposed = tuple[int, str, str]
"""Epoch, arm and cluster; the cluster is empty where units are assigned by themselves."""
Judged = tuple[int, str, str, bool]
"""The same, and whether the units count: those of a block's washout do not."""
Valued = tuple[str, int, str, str, bool]
"""Metric (or `outcome`), and of which units."""


def merged(one: Moments, other: Moments) -> Moments:
    """The moments of both together (Chan, Golub, LeVeque 1979)."""
    n = one.n + other.n
    if not one.n or not other.n:
        return one if one.n else other
    gap = other.mean - one.mean
    mean = one.mean + gap * other.n / n
    squares = one.squares + other.squares + gap**2 * one.n * other.n / n
    return Moments(n, mean, squares, min(one.low, other.low), max(one.high, other.high))


def moments_of(row: Any) -> Moments:
    """Of a row of `schema.moments` that has values."""
    return Moments(row.n, float(row.mean), float(row.squares), float(row.low), float(row.high))


@dataclass(frozen=True, slots=True)
class Design:
    """What of an experiment's config a look depends on."""

    randomize: str = "session"
    washout_s: float = 0.0
    block_s: float = 600.0
    window_s: float = WINDOW_S
    missing: tuple[tuple[str, float], ...] = ()
    """(Metric or `outcome`, what a unit counts with that has reported none); of other metrics it does not count."""
    ranges: tuple[tuple[str, float, float], ...] = ()
    """(Metric or `outcome`, low, high): values outside count as the nearer end."""


@dataclass
class Totals:
    """Sums over units."""

    exposures: dict[Exposed, int] = field(default_factory=dict)
    """Units."""
    judged: dict[Judged, int] = field(default_factory=dict)
    """Units whose windows are over."""
    values: dict[Valued, Moments] = field(default_factory=dict)
    """What these have reported within them."""

    def add(self, more: "Totals") -> None:
        for exposed, n in more.exposures.items():
            self.exposures[exposed] = self.exposures.get(exposed, 0) + n
        for judged, n in more.judged.items():
            self.judged[judged] = self.judged.get(judged, 0) + n
        for valued, found in more.values.items():
            self.values[valued] = merged(self.values.get(valued, NONE), found)

    def __bool__(self) -> bool:
        return bool(self.exposures or self.judged)


@dataclass
class Sums:
    """One experiment's sums, up to where they are final."""

    design: Design
    totals: Totals = field(default_factory=Totals)
    row: int = 0
    """Position of the first exposure that is not in the sums."""
    stored: float = -math.inf
    """Moment (seconds since 1970) until which units were stored whose windows are over."""

    def read(self, connection: sa.Connection, name: str, moment: float) -> tuple[Totals, bool]:
        """Continue the sums to a moment of `UnitStore.settled_at`, read before the transaction began. Returns what is
        known then, to be read only; and whether anything has come."""
        sqlite = connection.dialect.name == "sqlite"
        # A clock that is put back takes nothing back.
        stored = max(self.stored, moment - self.design.window_s - grace_s(self.design.window_s))
        row = _end(connection, sqlite)
        if sqlite and (row, stored) == (self.row, self.stored):
            return self.totals, False
        if not sqlite:
            # A fresh table has no statistics: PostgreSQL would join all of it for a few units, or all units one by one.
            for way in ("nestloop",) if not self.row else ("hashjoin", "mergejoin"):
                connection.execute(sa.text(f"SET LOCAL enable_{way} = off"))
        settled, rest = Totals(), Totals()
        # Everything is read before anything is added: an error half way must not count some twice.
        for found in connection.execute(self._exposures(name, row, sqlite)):
            of = settled if found.settled else rest
            of.exposures[found.epoch, found.arm, found.cluster] = found.rows
        units = self._due(name, row, stored, sqlite)
        for table in (schema.outcomes, schema.metrics):
            for found in connection.execute(self._values(table, units)):
                of = settled if found.settled else rest
                judged = found.epoch, found.arm, found.cluster, bool(found.counts)
                if table is schema.outcomes:
                    of.judged[judged] = found.rows
                if found.n:
                    of.values[(found.metric, *judged)] = moments_of(found)
        self.totals.add(settled)
        self.row, self.stored = row, stored
        if not rest:
            return self.totals, bool(settled)
        rest.add(self.totals)
        return rest, True

    def _keys(self, row: int, sqlite: bool) -> list[Any]:
        units = schema.exposures.c
        cluster = sa.literal("") if self.design.randomize == "session" else sa.func.coalesce(units.cluster, "")
        settled = sa.case((_position(sqlite) < row, 1), else_=0)
        return [units.epoch, units.arm, cluster.label("cluster"), settled.label("settled")]

    def _exposures(self, name: str, row: int, sqlite: bool) -> Any:
        """Units since the last look, apart for those before `row`."""
        here = sa.and_(schema.exposures.c.experiment == name, _position(sqlite) >= self.row)
        keys = sa.select(*self._keys(row, sqlite)).where(here).cte("units").c
        return sa.select(*keys, sa.func.count().label("rows")).group_by(*keys)

    def _due(self, name: str, row: int, stored: float, sqlite: bool) -> Any:
        """Units whose windows are over, of those since the last look and of those that were not due then."""
        units = schema.exposures.c
        columns = [units.experiment, units.unit, *self._keys(row, sqlite), counts_of(self.design).label("counts")]
        last = (units.stored_at + self.design.window_s).label("closes_at")
        query = sa.select(*columns, last).where(units.experiment == name)
        # Sums are no columns of an index: each half has the index that it needs and no other.
        since = query.where(_position(sqlite) >= self.row, units.stored_at + 0 <= stored)
        before = query.where(_position(sqlite) + 0 < self.row)
        waited = before.where(units.stored_at > self.stored, units.stored_at <= stored)
        return sa.union_all(since, waited).cte("due")

    def _values(self, table: sa.Table, due: sa.CTE) -> Any:
        """Moments of what the units have reported in time, and how many units there are."""
        mine = [table.c[key] == due.c[key] for key in ("experiment", "unit")]
        metric = table.c.metric if "metric" in table.c else sa.literal("outcome")
        keys = [due.c[key] for key in ("epoch", "arm", "cluster", "settled", "counts")]
        query = sa.select(*keys, metric.label("metric"), moved(table, self.design).label("value"))
        # All of the units, and only these: a join from the right would read every value of the experiment.
        found = query.join_from(due, table, sa.and_(*mine, table.c.arrived_at <= due.c.closes_at), isouter=True)
        return schema.moments(found.cte("units"), "epoch", "arm", "cluster", "settled", "counts", "metric")


def _position(sqlite: bool) -> Any:
    return sa.literal_column("exposures.rowid" if sqlite else "exposures.tx", sa.BigInteger)


def _end(connection: sa.Connection, sqlite: bool) -> int:
    """The position up to which every row is there."""
    if sqlite:
        last = sa.select(sa.func.max(_position(sqlite))).select_from(schema.exposures)
        return int(connection.execute(last).scalar() or 0) + 1
    oldest = sa.text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
    return int(connection.execute(oldest).scalar_one())


def moved(table: sa.Table, design: Design) -> Any:
    """The value of a row of outcomes or metrics, in its metric's range."""
    value, of_metric = table.c.value, []
    for metric, low, high in design.ranges:
        here = sa.literal(metric == "outcome") if table is schema.outcomes else table.c.metric == metric
        of_metric += [(sa.and_(here, value < low), low), (sa.and_(here, value > high), high)]
    return sa.case(*of_metric, else_=value) if of_metric else value


def counts_of(design: Design) -> Any:
    """1 for an exposure whose values count, 0 for one in its block's washout."""
    if design.randomize != "switchback":
        return sa.literal(1)
    units = schema.exposures.c
    return sa.case((units.first_at - schema.block_begin(units.cluster) >= design.washout_s, 1), else_=0)
