"""Sums over an experiment's units, continued from look to look, so that a process reads each row once.

A unit enters the sums of values when its window is over; nothing about it changes after that (`windows`). Two things
decide whether a row is final and due: its position and the moment it was stored. SQLite numbers rows as they are
written. On PostgreSQL a row carries its transaction's number (`tx`): rows below the oldest open transaction are final
and summed once; rows above it are summed anew at every look. So a look reads the rows above the last position, and of
those below it the units whose windows have ended since the last look: each unit once, in whatever order transactions
end and clocks run.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from marl_ray.experiments.database import schema
from marl_ray.experiments.database.windows import WINDOW_S, grace_s
from marl_ray.experiments.statistics.moments import NO_MOMENTS, Moments, merge_moments

Exposed = tuple[int, str, str]
"""Epoch, arm and cluster; the cluster is empty where units are assigned by themselves."""
Judged = tuple[int, str, str, bool]
"""Epoch, arm, cluster, and whether the units count: those in a block's washout do not."""
MetricCell = tuple[str, int, str, str, bool]
"""Metric (or `outcome`), then the key of `Judged`."""


def moments_of(row: Any) -> Moments:
    """Return the moments in a row of `schema.moments` that has values."""
    return Moments(row.n, float(row.mean), float(row.squares), float(row.low), float(row.high))


@dataclass(frozen=True, slots=True)
class LookSettings:
    """The part of an experiment's config that looks depend on."""

    randomize: str = "session"
    washout_s: float = 0.0
    block_s: float = 600.0
    window_s: float = WINDOW_S
    missing: tuple[tuple[str, float], ...] = ()
    """(Metric or `outcome`, value of a unit that has not reported it); of other metrics such a unit does not count."""
    ranges: tuple[tuple[str, float, float], ...] = ()
    """(Metric or `outcome`, low, high): a value outside counts as the nearer end."""


@dataclass
class Totals:
    """Sums over units."""

    exposures: dict[Exposed, int] = field(default_factory=dict)
    """Number of units."""
    judged: dict[Judged, int] = field(default_factory=dict)
    """Number of units whose windows are over."""
    values: dict[MetricCell, Moments] = field(default_factory=dict)
    """Values that judged units reported within their windows."""

    def add(self, more: "Totals") -> None:
        """Add the sums over other units to these, in place."""
        for exposed, n in more.exposures.items():
            self.exposures[exposed] = self.exposures.get(exposed, 0) + n
        for judged, n in more.judged.items():
            self.judged[judged] = self.judged.get(judged, 0) + n
        for valued, moments in more.values.items():
            self.values[valued] = merge_moments(self.values.get(valued, NO_MOMENTS), moments)

    def __bool__(self) -> bool:
        return bool(self.exposures or self.judged)


@dataclass
class RunningSums:
    """One experiment's running sums over the rows that are final."""

    settings: LookSettings
    totals: Totals = field(default_factory=Totals)
    row: int = 0
    """Position of the first exposure that is not in the sums."""
    stored: float = -math.inf
    """Units stored until this moment (seconds since 1970) have windows that are over."""

    def read(self, connection: sa.Connection, name: str, moment: float) -> tuple[Totals, bool]:
        """Continue the sums to `moment` and return them, and whether anything is new.

        `moment` is one of `Database.settled_at`, read before the transaction began. The returned sums are not
        to be changed.
        """
        sqlite = connection.dialect.name == "sqlite"
        # A clock that is put back takes no unit out again.
        stored = max(self.stored, moment - self.settings.window_s - grace_s(self.settings.window_s))
        row = _end_position(connection, sqlite)
        if sqlite and (row, stored) == (self.row, self.stored):
            return self.totals, False
        if not sqlite:
            # A fresh table has no statistics: PostgreSQL would join all of it for a few units, or all units one by one.
            for way in ("nestloop",) if not self.row else ("hashjoin", "mergejoin"):
                connection.execute(sa.text(f"SET LOCAL enable_{way} = off"))
        settled, open_rows = Totals(), Totals()
        # Everything is read before anything is added: an error half way must not count some twice.
        for sums in connection.execute(self._exposures(name, row, sqlite)):
            target = settled if sums.settled else open_rows
            target.exposures[sums.epoch, sums.arm, sums.cluster] = sums.rows
        units = self._due(name, row, stored, sqlite)
        for table in (schema.outcomes, schema.metrics):
            for sums in connection.execute(self._values(table, units)):
                target = settled if sums.settled else open_rows
                judged = sums.epoch, sums.arm, sums.cluster, bool(sums.counts)
                if table is schema.outcomes:
                    target.judged[judged] = sums.rows
                if sums.n:
                    target.values[(sums.metric, *judged)] = moments_of(sums)
        self.totals.add(settled)
        self.row, self.stored = row, stored
        if not open_rows:
            return self.totals, bool(settled)
        open_rows.add(self.totals)
        return open_rows, True

    def _keys(self, row: int, sqlite: bool) -> list[Any]:
        units = schema.exposures.c
        cluster = sa.literal("") if self.settings.randomize == "session" else sa.func.coalesce(units.cluster, "")
        settled = sa.case((_position(sqlite) < row, 1), else_=0)
        return [units.epoch, units.arm, cluster.label("cluster"), settled.label("settled")]

    def _exposures(self, name: str, row: int, sqlite: bool) -> Any:
        """Return the query of the units since the last look, in which those before position `row` are apart."""
        since_last = sa.and_(schema.exposures.c.experiment == name, _position(sqlite) >= self.row)
        keys = sa.select(*self._keys(row, sqlite)).where(since_last).cte("units").c
        return sa.select(*keys, sa.func.count().label("rows")).group_by(*keys)

    def _due(self, name: str, row: int, stored: float, sqlite: bool) -> Any:
        """Return the query of the units whose windows have ended since the last look.

        These units are new ones, and older ones that were not due then.
        """
        units = schema.exposures.c
        columns = [units.experiment, units.unit, *self._keys(row, sqlite), counts_sql(self.settings).label("counts")]
        last = (units.stored_at + self.settings.window_s).label("closes_at")
        query = sa.select(*columns, last).where(units.experiment == name)
        # Sums are no columns of an index: each half has the index that it needs and no other.
        new = query.where(_position(sqlite) >= self.row, units.stored_at + 0 <= stored)
        older = query.where(_position(sqlite) + 0 < self.row)
        newly_due = older.where(units.stored_at > self.stored, units.stored_at <= stored)
        return sa.union_all(new, newly_due).cte("due")

    def _values(self, table: sa.Table, due: sa.CTE) -> Any:
        """Return the query of the moments of the values that the units reported in time, and of the number of units."""
        same_unit = [table.c[key] == due.c[key] for key in ("experiment", "unit")]
        metric = table.c.metric if "metric" in table.c else sa.literal("outcome")
        keys = [due.c[key] for key in ("epoch", "arm", "cluster", "settled", "counts")]
        query = sa.select(*keys, metric.label("metric"), rescaled_value_sql(table, self.settings).label("value"))
        # All of the units, and only these: a join from the right would read every value of the experiment.
        joined = query.join_from(due, table, sa.and_(*same_unit, table.c.arrived_at <= due.c.closes_at), isouter=True)
        return schema.moments(joined.cte("units"), "epoch", "arm", "cluster", "settled", "counts", "metric")


def _position(sqlite: bool) -> Any:
    return sa.literal_column("exposures.rowid" if sqlite else "exposures.tx", sa.BigInteger)


def _end_position(connection: sa.Connection, sqlite: bool) -> int:
    """Return the position below which every row is final."""
    if sqlite:
        last = sa.select(sa.func.max(_position(sqlite))).select_from(schema.exposures)
        return int(connection.execute(last).scalar() or 0) + 1
    oldest = sa.text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
    return int(connection.execute(oldest).scalar_one())


def rescaled_value_sql(table: sa.Table, settings: LookSettings) -> Any:
    """Return the SQL for the value of a row of outcomes or metrics, moved into its metric's range."""
    value, of_metric = table.c.value, []
    for metric, low, high in settings.ranges:
        is_metric = sa.literal(metric == "outcome") if table is schema.outcomes else table.c.metric == metric
        of_metric += [(sa.and_(is_metric, value < low), low), (sa.and_(is_metric, value > high), high)]
    return sa.case(*of_metric, else_=value) if of_metric else value


def counts_sql(settings: LookSettings) -> Any:
    """Return the SQL that is 1 for an exposure whose values count, 0 for one in its block's washout."""
    if settings.randomize != "switchback":
        return sa.literal(1)
    units = schema.exposures.c
    return sa.case((units.first_at - schema.block_begin(units.cluster) >= settings.washout_s, 1), else_=0)
