"""The part of the experiment store that keeps what happened to units: their exposures, outcomes and metrics."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from marl_ray.errors import MarlRayError, one_line
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.store import schema, windows
from marl_ray.experiments.store.reports import Changes, Known, Recorded, Report

NO_TERMS = windows.Terms(0.0, {})
NO_OUTCOME = Summary(0, math.nan, 0.0)

_EXPOSED = schema.exposures.c
_ASSIGNMENTS = sa.select(_EXPOSED.unit, _EXPOSED.arm, _EXPOSED.epoch, _EXPOSED.propensity).where(
    _EXPOSED.experiment == sa.bindparam("experiment"), _EXPOSED.unit.in_(sa.bindparam("units", expanding=True))
)
"""Made once, as it is asked often."""


class StoreError(MarlRayError):
    """The database cannot be used; not the caller's mistake."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """A unit met an arm. `at` is seconds since 1970."""

    experiment: str
    unit: str
    assignment: Assignment
    at: float
    cluster: str | None = None
    """The cluster or block whose arm it is, where not the unit itself was assigned."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A value that replaced another one within the unit's window. `at` is seconds since 1970."""

    experiment: str
    unit: str
    metric: str
    """`outcome`, or a metric's name."""
    old: float
    new: float
    at: float
    actor: str


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm's units and outcomes."""

    exposures: int
    judged: int
    """Units whose windows are over."""
    outcomes: Summary
    """What these have reported."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A unit's outcome and the assignment it is of; times are seconds since 1970."""

    unit: str
    arm: str
    epoch: int
    propensity: float
    exposed_at: float
    value: float
    at: float


class UnitStore:
    """Exposures, outcomes and metrics. Safe to use from several threads, processes and machines."""

    def __init__(self, url: str, clock: Callable[[], float] | None = None):
        """Connect and bring the schema up to date. MarlRayError unless the URL is of a usable SQLite or PostgreSQL.

        `clock` (seconds since 1970) takes the place of the database's clock, by which windows run: for simulations.
        """
        self.clock = clock
        self._engine = schema.open_engine(url)
        self._writer = self._engine.execution_options(writes=True)
        self._insert: Any = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self, engine: sa.Engine | None = None) -> Iterator[sa.Connection]:
        try:
            with (engine or self._engine).begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"experiment store: {one_line(error)}") from error

    def record_exposures(self, exposures: Sequence[Exposure]) -> None:
        """Write exposures in one transaction; units that already have one keep it."""
        if not exposures:
            return
        # In one order everywhere: two writers with the same units in different orders would wait for each other.
        rows: list[dict[str, Any]] = [
            {
                "experiment": e.experiment,
                "unit": e.unit,
                "arm": e.assignment.arm,
                "epoch": e.assignment.epoch,
                "propensity": e.assignment.propensity,
                "first_at": e.at,
                "cluster": e.cluster,
            }
            for e in sorted(exposures, key=lambda e: (e.experiment, e.unit))
        ]
        with self._transaction(self._writer) as connection:
            now = self._arrival(connection)
            rows = [row | {"stored_at": now} for row in rows]
            connection.execute(self._insert(schema.exposures).on_conflict_do_nothing(), rows)

    def _arrival(self, connection: sa.Connection) -> float:
        return self.clock() if self.clock is not None else windows.arrival(connection)

    def settled_at(self) -> float:
        """The moment until which all that arrived is written, see `windows.settled_at`."""
        if self.clock is not None:
            return self.clock()
        with self._transaction() as connection:
            return windows.settled_at(connection)

    def assignment(self, experiment: str, unit: str) -> Assignment | None:
        """The arm of the unit's first exposure, or None."""
        with self._transaction() as connection:
            return _assignment(connection, experiment, unit)

    def assignments(self, asked: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Assignment]:
        """The arms of the first exposures of many (experiment, unit), of those that have one."""
        by_experiment: dict[str, list[str]] = {}
        for experiment, unit in asked:
            by_experiment.setdefault(experiment, []).append(unit)
        found: dict[tuple[str, str], Assignment] = {}
        with self._transaction() as connection:
            for experiment, wanted in by_experiment.items():
                rows = connection.execute(_ASSIGNMENTS, {"experiment": experiment, "units": wanted})
                found |= {(experiment, unit): Assignment(*rest) for unit, *rest in rows}
        return found

    def record_outcome(self, experiment: str, unit: str, value: float, at: float | None = None) -> Assignment:
        """Store a unit's outcome and return whose it is, by the rules of `record`; raises what that returns."""
        return self._record_one(experiment, Report(unit, {"outcome": value}, at))

    def record_metrics(
        self, experiment: str, unit: str, metrics: Mapping[str, float], at: float | None = None
    ) -> Assignment:
        """Store named numbers of a unit, all or none, by the rules of `record`; raises what that returns."""
        if "outcome" in metrics:
            raise MarlRayError("metrics: expected names other than 'outcome'")
        return self._record_one(experiment, Report(unit, metrics, at))

    def _record_one(self, experiment: str, report: Report) -> Assignment:
        found = self.record(experiment, [report])[0]
        if isinstance(found, MarlRayError):
            raise found
        return found.assignment

    def record(
        self, experiment: str, reports: Sequence[Report], actor: str = "client"
    ) -> list[Recorded | MarlRayError]:
        """Store what clients tell of units, in one transaction; each report whole or, with an error in its place, not.

        Reports may come in any order, and after the experiment is over. The same value again changes nothing. Another
        one replaces it while the unit's window lasts, and is an OutcomeConflictError after; the replaced one is kept with
        the `actor` as a `Correction`. Of `error` the largest value stands: a failure that happened is not taken back. What
        arrives after the window is kept and does not count. UnknownUnitError stands for a unit without an exposure,
        MarlRayError for a name or a number that cannot be stored.
        """
        with self._transaction(self._writer) as connection:
            names = sorted({report.unit for report in reports})
            units = self._units(connection, experiment, names)
            now, terms = self._arrival(connection), windows.terms_of(connection, experiment) if units else NO_TERMS
            known = self._values(connection, experiment, list(units))
            changes = Changes(experiment, actor, now, terms, units, known)
            found = [changes.add(report) for report in reports]
            for table, rows in changes.rows():
                insert = self._insert(table)
                new = {key: insert.excluded[key] for key in ("value", "at", "arrived_at")}
                keys = [column.name for column in table.primary_key]
                connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=new), rows)
            if changes.corrections:
                connection.execute(sa.insert(schema.corrections), changes.corrections)
        return found

    def _units(
        self, connection: sa.Connection, experiment: str, names: list[str]
    ) -> dict[str, tuple[Assignment, float]]:
        """Unit -> its assignment, and when its exposure was stored.

        Nobody else reports of them until the transaction ends.
        """
        units = schema.exposures.c
        query = sa.select(units.unit, units.arm, units.epoch, units.propensity, units.stored_at)
        # In one order everywhere: else two writers would wait for each other.
        query = query.where(units.experiment == experiment, units.unit.in_(names)).order_by(units.unit)
        rows = connection.execute(query.with_for_update(key_share=True)).all()
        return {row.unit: (Assignment(row.arm, row.epoch, row.propensity), row.stored_at) for row in rows}

    def _values(self, connection: sa.Connection, experiment: str, names: list[str]) -> Known:
        known: Known = {}
        for table in (schema.outcomes, schema.metrics) if names else ():
            metric = table.c.metric if "metric" in table.c else sa.literal("outcome")
            query = sa.select(table.c.unit, metric.label("metric"), table.c.value, table.c.arrived_at)
            for row in connection.execute(query.where(table.c.experiment == experiment, table.c.unit.in_(names))):
                known[row.unit, row.metric] = row.value, row.arrived_at
        return known

    def corrections(self, experiment: str) -> list[Correction]:
        """Every value that has been replaced, the oldest first."""
        here = schema.corrections.c
        query = sa.select(*(here[name.name] for name in fields(Correction)))
        with self._transaction() as connection:
            rows = connection.execute(query.where(here.experiment == experiment).order_by(here.id))
            return [Correction(*row) for row in rows]

    def _is_new(self, connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> bool:
        """Insert the row unless its key is taken; whether it was not."""
        # Not by the row count, which SQLAlchemy does not know of PostgreSQL's inserts (it says -1).
        insert = self._insert(table).values(row).on_conflict_do_nothing().returning(sa.literal(1))
        return connection.execute(insert).first() is not None

    def record_shadows(self, experiment: str, replica: str, totals: Mapping[str, Mapping[str, float]]) -> None:
        """Store what a replica has counted of each shadowed arm since it began: `acts`, `errors`, `dropped` copies, agents'
        `decisions` compared with the answer's and those that `agreed`, the `seconds` of its passes, and of texts the
        `tokens` that it read, with its own `log_prob` and the `served_log_prob`. What is missing is 0; a later call
        replaces an earlier one's numbers."""
        names = (*schema.SHADOW_COUNTS, *schema.SHADOW_SUMS)
        key = {"experiment": experiment, "replica": replica}
        with self._transaction(self._writer) as connection:
            for arm in sorted(totals):
                values = {"at": time.time(), **{name: totals[arm].get(name, 0) for name in names}}
                insert = self._insert(schema.shadow_totals).values(arm=arm, **key, **values)
                same = ["experiment", "arm", "replica"]
                connection.execute(insert.on_conflict_do_update(index_elements=same, set_=values))

    def shadow_totals(self, experiment: str) -> dict[str, dict[str, float]]:
        """Arm -> the totals of all replicas, and `at`, when the last of them was written."""
        found = schema.shadow_totals.c
        # Rows of before a column was there have none.
        sums = {
            name: sa.func.sum(sa.func.coalesce(found[name], 0)) for name in (*schema.SHADOW_COUNTS, *schema.SHADOW_SUMS)
        }
        counts = [sa.cast(sums[name], sa.BigInteger).label(name) for name in schema.SHADOW_COUNTS]
        more = *(sums[name].label(name) for name in schema.SHADOW_SUMS), sa.func.max(found.at).label("at")
        query = sa.select(found.arm, *counts, *more).where(found.experiment == experiment).group_by(found.arm)
        with self._transaction() as connection:
            rows = [dict(row) for row in connection.execute(query.order_by(found.arm)).mappings()]
        return {row.pop("arm"): row for row in rows}

    def outcomes(self, name: str, page: int = 1_000) -> Iterator[Outcome]:
        """Every outcome by time, then unit, `page` rows per query. What is written meanwhile with an earlier time than
        the last one read is left out."""
        units, found = schema.exposures.c, schema.outcomes
        columns = (units.unit, units.arm, units.epoch, units.propensity, units.first_at, found.c.value, found.c.at)
        query = sa.select(*columns).join_from(found, schema.exposures, schema.same_unit(found))
        query = query.where(found.c.experiment == name).order_by(found.c.at, found.c.unit).limit(page)
        last: Outcome | None = None
        while True:
            later = query
            if last is not None:
                later = query.where(sa.tuple_(found.c.at, found.c.unit) > sa.tuple_(last.at, last.unit))
            with self._transaction() as connection:
                rows = [Outcome(*row) for row in connection.execute(later)]
            yield from rows
            if len(rows) < page:
                return
            last = rows[-1]

    def metric_values(self, experiment: str, metric: str, page: int = 1_000) -> Iterator[tuple[str, float]]:
        """Every unit's value of a metric, by unit, `page` rows per query."""
        found = schema.metrics.c
        query = sa.select(found.unit, found.value).order_by(found.unit).limit(page)
        query = query.where(found.experiment == experiment, found.metric == metric)
        rows: list[tuple[str, float]] = []
        while True:
            later = query.where(found.unit > rows[-1][0]) if rows else query
            with self._transaction() as connection:
                rows = [(row.unit, row.value) for row in connection.execute(later)]
            yield from rows
            if len(rows) < page:
                return


def _assignment(connection: sa.Connection, experiment: str, unit: str) -> Assignment | None:
    units = schema.exposures.c
    query = sa.select(units.arm, units.epoch, units.propensity)
    row = connection.execute(query.where(units.experiment == experiment, units.unit == unit)).first()
    return Assignment(*row) if row else None
