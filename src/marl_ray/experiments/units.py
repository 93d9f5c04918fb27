"""The half of the experiment store that is about units: their exposures, outcomes and metrics, and what these add up to."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from marl_ray.errors import MarlRayError, one_line
from marl_ray.experiments import schema
from marl_ray.experiments.assignment import Assignment
from marl_ray.experiments.statistics import Summary

LARGEST_VALUE = 1e100
"""Larger numbers would overflow the database's sums of squares."""
METRIC_LENGTH = 100
NO_OUTCOME = Summary(0, math.nan, 0.0)


_EXPOSED = schema.exposures.c
_ASSIGNMENTS = sa.select(_EXPOSED.unit, _EXPOSED.arm, _EXPOSED.epoch, _EXPOSED.propensity).where(
    _EXPOSED.experiment == sa.bindparam("experiment"), _EXPOSED.unit.in_(sa.bindparam("units", expanding=True))
)
"""Made once, as it is asked often."""


class StoreError(MarlRayError):
    """The database cannot be used; not the caller's mistake."""


class UnknownUnitError(MarlRayError):
    """An outcome for a unit that was never exposed."""


class OutcomeConflictError(MarlRayError):
    """A second outcome or metric value for a unit, with another value."""


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
class ArmSummary:
    """One arm's exposures and outcomes."""

    exposures: int
    outcomes: Summary


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

    def __init__(self, url: str):
        """Connect and bring the schema up to date. MarlRayError unless the URL is of a usable SQLite or PostgreSQL."""
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
        rows = [
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
            connection.execute(self._insert(schema.exposures).on_conflict_do_nothing(), rows)

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
        """Store a unit's outcome and return whose it is. `at` is when it came about (seconds since 1970), now if not
        given; outcomes may come in any order, and after the experiment is over.

        The same value again changes nothing. Raises UnknownUnitError for a unit without an exposure and
        OutcomeConflictError for a second value.
        """
        row = {"experiment": experiment, "unit": unit, "value": value, "at": time.time() if at is None else at}
        with self._transaction(self._writer) as connection:
            assignment = self._of_known_unit(connection, experiment, unit)
            known = self._write_once(connection, schema.outcomes, row)
        if known != value:
            raise OutcomeConflictError(f"value: session {unit!r} already has outcome {known!r}, got {value!r}")
        return assignment

    def record_metrics(
        self, experiment: str, unit: str, metrics: Mapping[str, float], at: float | None = None
    ) -> Assignment:
        """Store named numbers of a unit (`{"cost": 1.0, "latency_s": 0.2}`), all or none, under the rules of
        `record_outcome`; MarlRayError for a number that is not finite or above 1e100 in size, or named `outcome`."""
        for metric, value in metrics.items():
            if metric == "outcome" or not 0 < len(metric) <= METRIC_LENGTH:
                raise MarlRayError(
                    f"metrics: expected names of 1 to {METRIC_LENGTH} characters other than 'outcome', got {metric!r}"
                )
            if not abs(value) <= LARGEST_VALUE:
                raise MarlRayError(
                    f"metrics.{metric}: expected a number of size {LARGEST_VALUE:g} at most, got {value!r}"
                )
        moment = time.time() if at is None else at
        with self._transaction(self._writer) as connection:
            assignment = self._of_known_unit(connection, experiment, unit)
            for metric, value in sorted(metrics.items()):
                row = {"experiment": experiment, "unit": unit, "metric": metric, "value": float(value), "at": moment}
                known = self._write_once(connection, schema.metrics, row)
                if known != value:
                    raise OutcomeConflictError(
                        f"metrics.{metric}: session {unit!r} already has {known!r}, got {value!r}"
                    )
        return assignment

    def _of_known_unit(self, connection: sa.Connection, experiment: str, unit: str) -> Assignment:
        assignment = _assignment(connection, experiment, unit)
        if assignment is None:
            raise UnknownUnitError(f"session_id: {unit!r} has no exposure in experiment {experiment!r}")
        return assignment

    def _is_new(self, connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> bool:
        """Insert the row unless its key is taken; whether it was not."""
        # Not by the row count, which SQLAlchemy does not know of PostgreSQL's inserts (it says -1).
        insert = self._insert(table).values(row).on_conflict_do_nothing().returning(sa.literal(1))
        return connection.execute(insert).first() is not None

    def _write_once(self, connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> float:
        """Insert the row unless its key is taken; returns the value that is there then."""
        if self._is_new(connection, table, row):
            return float(row["value"])
        same_key = (column == row[column.name] for column in table.primary_key)
        return float(connection.execute(sa.select(table.c.value).where(*same_key)).scalar_one())

    def record_shadows(self, experiment: str, replica: str, totals: Mapping[str, Mapping[str, float]]) -> None:
        """Store what a replica has counted of each shadowed arm since it began: `acts`, `errors`, `dropped` copies, agents'
        `decisions` compared with the answer's and those that `agreed`, and the `seconds` of its passes. What is
        missing is 0; a later call replaces an earlier one's numbers."""
        names = (*schema.SHADOW_COUNTS, "seconds")
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
        counts = [sa.cast(sa.func.sum(found[name]), sa.BigInteger).label(name) for name in schema.SHADOW_COUNTS]
        more = sa.func.sum(found.seconds).label("seconds"), sa.func.max(found.at).label("at")
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
