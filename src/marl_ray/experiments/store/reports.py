"""Reports of units, and the changes that they make to stored values, as pure functions."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.database import schema, windows

MAX_VALUE = 1e100
"""Larger numbers would overflow the database's sums of squares."""
MAX_METRIC_LENGTH = 100
"""Maximum number of characters in the name of a metric, which a column of `schema.metrics` holds."""
NEVER = math.inf
"""Arrival of a value that is incomplete: it lies after every window, so the value does not count."""
StoredValues = dict[tuple[str, str], tuple[float, float]]
"""(Unit, metric) -> its value, and when that arrived in seconds since 1970."""


class UnknownUnitError(MarlRayError):
    """An outcome for a unit that was never exposed."""


class OutcomeConflictError(MarlRayError):
    """Another value for a unit whose window is over."""


@dataclass(frozen=True, slots=True)
class Report:
    """A client's report about a unit."""

    unit: str
    values: Mapping[str, float]
    """`outcome`, and named metrics (`{"cost": 1.0, "latency_s": 0.2}`)."""
    at: float | None = None
    """Moment of the outcome, in seconds since 1970; now when not given.

    It is for charts and exports: what counts is when the outcome arrives.
    """
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics that never replace what is known."""
    added: Mapping[str, float] = field(default_factory=dict)
    """Amounts of metrics, each on top of what is known; after the unit's window they are dropped."""
    incomplete: Collection[str] = ()
    """Metrics of which an amount is unknown: what is known of them is kept, and never counts. After the unit's window this
    changes nothing."""


@dataclass(frozen=True, slots=True)
class RecordedReport:
    """A report that is stored."""

    assignment: Assignment
    late_s: float | None
    """Seconds between the end of the unit's window and its values, which then do not count; None if they came in time."""


@dataclass
class Changes:
    """The changes that one transaction's reports make to the known values."""

    experiment: str
    actor: str
    """The reporter, for the corrections."""
    now: float
    """Arrival of the reports by the database's clock, in seconds since 1970."""
    rules: windows.ReportRules
    units: Mapping[str, tuple[Assignment, float]]
    """Unit -> its assignment, and when that was stored in seconds since 1970."""
    stored: StoredValues
    """The known values of these units; `add` changes them."""
    changed: dict[tuple[str, str], float | None] = field(default_factory=dict)
    """(Unit, metric) -> when it came about."""
    corrections: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the table of corrections."""

    def add(self, report: Report) -> RecordedReport | MarlRayError:
        """Take the values of one report into the known ones, and return the report as it is recorded.

        Returns an error, after changing nothing, for a unit without an exposure and for values that are refused.
        """
        if report.unit not in self.units:
            return UnknownUnitError(f"session_id: {report.unit!r} has no exposure in experiment {self.experiment!r}")
        try:
            _check_values(report.values, self.rules.bounds)
            assignment, stored_at = self.units[report.unit]
            closes_at = stored_at + self.rules.window_s
            news = {
                metric: value
                for metric, value in report.values.items()
                if self._differs(report, metric, value, closes_at)
            }
        except MarlRayError as error:
            return error
        news |= {metric: value for metric, value in report.measured.items() if (report.unit, metric) not in self.stored}
        for metric, value in news.items():
            key = report.unit, metric
            if key in self.stored:
                names = {"experiment": self.experiment, "unit": report.unit, "metric": metric}
                change = {"old": self.stored[key][0], "new": value, "at": self.now, "actor": self.actor}
                self.corrections.append(names | change)
            self.stored[key], self.changed[key] = (value, self.now), report.at
        for metric, amount in report.added.items() if self.now <= closes_at else ():
            key = report.unit, metric
            value, arrived_at = self.stored.get(key, (0.0, self.now))
            self.stored[key] = value + amount, max(arrived_at, self.now)  # what is incomplete stays so
            self.changed[key] = report.at
        for metric in report.incomplete if self.now <= closes_at else ():
            key = report.unit, metric
            self.stored[key] = self.stored.get(key, (0.0, self.now))[0], NEVER
            self.changed[key] = report.at
        arrived = [self.stored[report.unit, metric][1] for metric in report.values]
        late = max(arrived, default=self.now) - closes_at
        return RecordedReport(assignment, late if late > 0 else None)

    def _differs(self, report: Report, metric: str, value: float, closes_at: float) -> bool:
        old, arrived_at = self.stored.get((report.unit, metric), (None, None))
        if old is None or (old == value and arrived_at != NEVER) or (metric == "error" and old > value):
            return old is None
        if self.now > closes_at:
            what, has = ("value", "has outcome") if metric == "outcome" else (f"metrics.{metric}", "has")
            raise OutcomeConflictError(
                f"{what}: session {report.unit!r} already {has} {old!r}, got {value!r}; "
                f"its window of {self.rules.window_s:g} s for corrections is over"
            )
        return True

    def rows(self) -> Iterator[tuple[sa.Table, list[dict[str, Any]]]]:
        """Yield the tables and what is written to them."""
        rows_of: dict[bool, list[dict[str, Any]]] = {}
        for (unit, metric), at in sorted(self.changed.items(), key=lambda item: item[0]):
            value, arrived_at = self.stored[unit, metric]
            row = {"experiment": self.experiment, "unit": unit, "value": float(value), "arrived_at": arrived_at}
            row["at"] = self.now if at is None else at
            is_outcome = metric == "outcome"
            rows_of.setdefault(is_outcome, []).append(row if is_outcome else row | {"metric": metric})
        for is_outcome, rows in rows_of.items():
            yield schema.outcomes if is_outcome else schema.metrics, rows


def _check_values(values: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> None:
    for metric, value in values.items():
        what = "value" if metric == "outcome" else f"metrics.{metric}"
        if not 0 < len(metric) <= MAX_METRIC_LENGTH:
            raise MarlRayError(f"metrics: expected names of 1 to {MAX_METRIC_LENGTH} characters, got {metric!r}")
        if not abs(value) <= MAX_VALUE:
            raise MarlRayError(f"{what}: expected a number of size {MAX_VALUE:g} at most, got {value!r}")
        low, high = bounds.get(metric, (-math.inf, math.inf))
        if not low <= value <= high:
            raise MarlRayError(f"{what}: expected a number from {low:g} to {high:g}, its bounds, got {value!r}")
