"""The store of what happened to units: their exposures, outcomes and metrics."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.database import schema, windows
from marl_ray.experiments.database.connections import Database
from marl_ray.experiments.store.reports import Changes, RecordedReport, Report, StoredValues

NO_REPORT_RULES = windows.ReportRules(0.0, {})

_EXPOSED = schema.exposures.c
_ASSIGNMENTS = sa.select(_EXPOSED.unit, _EXPOSED.arm, _EXPOSED.epoch, _EXPOSED.propensity).where(
    _EXPOSED.experiment == sa.bindparam("experiment"), _EXPOSED.unit.in_(sa.bindparam("units", expanding=True))
)
"""A query that is built once, because it is asked often."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """The first assignment of a unit to an arm. `at` is in seconds since 1970."""

    experiment: str
    unit: str
    assignment: Assignment
    at: float
    cluster: str | None = None
    """The cluster of units or the block that was assigned, or None if the unit itself was."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A value that replaced another one within the unit's window. `at` is seconds since 1970."""

    experiment: str
    unit: str
    metric: str
    """`outcome`, or a metric's name."""
    old: float
    """In the unit of the metric, as `new`."""
    new: float
    at: float
    actor: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A unit's outcome with the unit's assignment; times are in seconds since 1970."""

    unit: str
    arm: str
    epoch: int
    propensity: float
    """Chance with which the unit got its arm, in (0, 1]."""
    exposed_at: float
    """Time of its first assignment."""
    value: float
    at: float
    """Time of the outcome, as its reporter says."""


class UnitStore:
    """Exposures, outcomes and metrics. Safe to use from several threads, processes and machines.

    Every method may raise StoreError.
    """

    def __init__(self, database: Database):
        self._database = database

    def record_exposures(self, exposures: Sequence[Exposure]) -> None:
        """Write exposures in one transaction; units that already have one keep it."""
        if not exposures:
            return
        # All writers use one order: two writers with the same units in different orders would wait for each other.
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
        with self._database.write_transaction() as connection:
            now = self._database.arrival(connection)
            rows = [row | {"stored_at": now} for row in rows]
            connection.execute(self._database.insert(schema.exposures).on_conflict_do_nothing(), rows)

    def assignment(self, experiment: str, unit: str) -> Assignment | None:
        """Return the arm of the unit's first exposure, or None."""
        with self._database.transaction() as connection:
            return _assignment(connection, experiment, unit)

    def assignments(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Assignment]:
        """Return (experiment, unit) -> the arm of its first exposure, for those of `pairs` that have one."""
        by_experiment: dict[str, list[str]] = {}
        for experiment, unit in pairs:
            by_experiment.setdefault(experiment, []).append(unit)
        arms: dict[tuple[str, str], Assignment] = {}
        with self._database.transaction() as connection:
            for experiment, units in by_experiment.items():
                rows = connection.execute(_ASSIGNMENTS, {"experiment": experiment, "units": units})
                arms |= {(experiment, unit): Assignment(*rest) for unit, *rest in rows}
        return arms

    def record(
        self, experiment: str, reports: Sequence[Report], actor: str = "client"
    ) -> list[RecordedReport | MarlRayError]:
        """Store clients' reports in one transaction, and return what became of each.

        A report with an error is not stored, and its error is in its place. Reports may come in any order, and after the
        experiment is over. Reporting the same value again changes nothing. Another value replaces it while the unit's window
        lasts, and gives an OutcomeConflictError after; the replaced value is kept with the `actor` as a `Correction`. For
        `error` the largest value stands: a failure that happened is not taken back. A first value that arrives after the
        window is kept and does not count. A unit without an exposure gives an UnknownUnitError; a name or number that cannot
        be stored gives a MarlRayError.
        """
        with self._database.write_transaction() as connection:
            names = sorted({report.unit for report in reports})
            units = self._units(connection, experiment, names)
            now = self._database.arrival(connection)
            rules = windows.report_rules_of(connection, experiment) if units else NO_REPORT_RULES
            stored_values = self._values(connection, experiment, list(units))
            changes = Changes(experiment, actor, now, rules, units, stored_values)
            results = [changes.add(report) for report in reports]
            for table, rows in changes.rows():
                insert = self._database.insert(table)
                new = {key: insert.excluded[key] for key in ("value", "at", "arrived_at")}
                keys = [column.name for column in table.primary_key]
                connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=new), rows)
            if changes.corrections:
                connection.execute(sa.insert(schema.corrections), changes.corrections)
        return results

    def _units(
        self, connection: sa.Connection, experiment: str, names: list[str]
    ) -> dict[str, tuple[Assignment, float]]:
        """Return unit -> its assignment, and the moment its exposure was stored.

        The rows are locked: nobody else reports about these units until the transaction ends.
        """
        units = schema.exposures.c
        query = sa.select(units.unit, units.arm, units.epoch, units.propensity, units.stored_at)
        # All writers use one order: else two of them would wait for each other.
        query = query.where(units.experiment == experiment, units.unit.in_(names)).order_by(units.unit)
        rows = connection.execute(query.with_for_update(key_share=True)).all()
        return {row.unit: (Assignment(row.arm, row.epoch, row.propensity), row.stored_at) for row in rows}

    def _values(self, connection: sa.Connection, experiment: str, names: list[str]) -> StoredValues:
        stored: StoredValues = {}
        for table in (schema.outcomes, schema.metrics) if names else ():
            metric = table.c.metric if "metric" in table.c else sa.literal("outcome")
            query = sa.select(table.c.unit, metric.label("metric"), table.c.value, table.c.arrived_at)
            for row in connection.execute(query.where(table.c.experiment == experiment, table.c.unit.in_(names))):
                stored[row.unit, row.metric] = row.value, row.arrived_at
        return stored

    def corrections(self, experiment: str) -> list[Correction]:
        """Return all replaced values of the experiment, the oldest first."""
        corrections = schema.corrections.c
        query = sa.select(*(corrections[name.name] for name in fields(Correction)))
        with self._database.transaction() as connection:
            rows = connection.execute(query.where(corrections.experiment == experiment).order_by(corrections.id))
            return [Correction(*row) for row in rows]

    def record_shadows(self, experiment: str, replica: str, totals: Mapping[str, Mapping[str, float]]) -> None:
        """Store the totals that a replica has counted for each shadowed arm since the replica began.

        Totals are `acts`, `errors`, `dropped` copies, agents' `decisions` that were compared with the answer's and how
        many of them `agreed`, the `seconds` of its passes, and for texts the `tokens` read, with the arm's `log_prob`
        and the `served_log_prob`. A missing total is 0; a later call replaces the numbers of an earlier one.
        """
        names = (*schema.SHADOW_COUNTS, *schema.SHADOW_SUMS)
        key = {"experiment": experiment, "replica": replica}
        with self._database.write_transaction() as connection:
            for arm in sorted(totals):
                values = {"at": time.time(), **{name: totals[arm].get(name, 0) for name in names}}
                insert = self._database.insert(schema.shadow_totals).values(arm=arm, **key, **values)
                same = ["experiment", "arm", "replica"]
                connection.execute(insert.on_conflict_do_update(index_elements=same, set_=values))

    def shadow_totals(self, experiment: str) -> dict[str, dict[str, float]]:
        """Return arm -> the totals of all replicas, with `at`, the moment of their latest write."""
        totals = schema.shadow_totals.c
        # Rows that were written before a column existed hold NULL in it.
        sums = {
            name: sa.func.sum(sa.func.coalesce(totals[name], 0))
            for name in (*schema.SHADOW_COUNTS, *schema.SHADOW_SUMS)
        }
        counts = [sa.cast(sums[name], sa.BigInteger).label(name) for name in schema.SHADOW_COUNTS]
        more = *(sums[name].label(name) for name in schema.SHADOW_SUMS), sa.func.max(totals.at).label("at")
        query = sa.select(totals.arm, *counts, *more).where(totals.experiment == experiment).group_by(totals.arm)
        with self._database.transaction() as connection:
            rows = [dict(row) for row in connection.execute(query.order_by(totals.arm)).mappings()]
        return {row.pop("arm"): row for row in rows}

    def outcomes(self, name: str, page: int = 1_000) -> Iterator[Outcome]:
        """Yield every outcome by time, then unit; each query reads `page` rows.

        Outcomes written meanwhile with an earlier time than the last one read are left out.
        """
        units, outcomes = schema.exposures.c, schema.outcomes
        columns = (
            units.unit,
            units.arm,
            units.epoch,
            units.propensity,
            units.first_at,
            outcomes.c.value,
            outcomes.c.at,
        )
        query = sa.select(*columns).join_from(outcomes, schema.exposures, schema.same_unit(outcomes))
        query = query.where(outcomes.c.experiment == name).order_by(outcomes.c.at, outcomes.c.unit).limit(page)
        last: Outcome | None = None
        while True:
            later = query
            if last is not None:
                later = query.where(sa.tuple_(outcomes.c.at, outcomes.c.unit) > sa.tuple_(last.at, last.unit))
            with self._database.transaction() as connection:
                rows = [Outcome(*row) for row in connection.execute(later)]
            yield from rows
            if len(rows) < page:
                return
            last = rows[-1]

    def metric_values(self, experiment: str, metric: str, page: int = 1_000) -> Iterator[tuple[str, float]]:
        """Yield every unit's value of a metric, by unit; each query reads `page` rows."""
        values = schema.metrics.c
        query = sa.select(values.unit, values.value).order_by(values.unit).limit(page)
        query = query.where(values.experiment == experiment, values.metric == metric)
        rows: list[tuple[str, float]] = []
        while True:
            later = query.where(values.unit > rows[-1][0]) if rows else query
            with self._database.transaction() as connection:
                rows = [(row.unit, row.value) for row in connection.execute(later)]
            yield from rows
            if len(rows) < page:
                return


def _assignment(connection: sa.Connection, experiment: str, unit: str) -> Assignment | None:
    units = schema.exposures.c
    query = sa.select(units.arm, units.epoch, units.propensity)
    row = connection.execute(query.where(units.experiment == experiment, units.unit == unit)).first()
    return Assignment(*row) if row else None
