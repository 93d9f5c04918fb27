"""The experiment store: what was configured, who was exposed to what, and what came of it, in a SQL database.

Rules that the database itself keeps, whatever processes do: a unit has one exposure per experiment, the first, for
good; and one outcome at most, which a repeated post cannot change.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from marl_ray.errors import MarlRayError, one_line
from marl_ray.experiments.assignment import Assignment
from marl_ray.experiments.statistics import Summary

BUSY_S = 10.0
"""How long a write waits for another process's write."""

_metadata = sa.MetaData()
_experiments = sa.Table(
    "experiments",
    _metadata,
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)
_exposures = sa.Table(
    "exposures",
    _metadata,
    sa.Column("experiment", sa.ForeignKey("experiments.name"), primary_key=True),
    sa.Column("unit", sa.String(256), primary_key=True),
    sa.Column("arm", sa.String(100), nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("propensity", sa.Float(53), nullable=False),
    sa.Column("first_at", sa.Float(53), nullable=False),
)
_outcomes = sa.Table(
    "outcomes",
    _metadata,
    sa.Column("experiment", sa.String(100), primary_key=True),
    sa.Column("unit", sa.String(256), primary_key=True),
    sa.Column("value", sa.Float(53), nullable=False),
    sa.Column("at", sa.Float(53), nullable=False),
    sa.ForeignKeyConstraint(["experiment", "unit"], ["exposures.experiment", "exposures.unit"]),
)


class StoreError(MarlRayError):
    """The database cannot be used; not the caller's mistake."""


class UnknownUnitError(MarlRayError):
    """An outcome for a unit that was never exposed."""


class OutcomeConflictError(MarlRayError):
    """A second outcome for a unit, with another value."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """A unit met an arm. `at` is seconds since 1970."""

    experiment: str
    unit: str
    assignment: Assignment
    at: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm's exposures and outcomes."""

    exposures: int
    outcomes: Summary


@dataclass(frozen=True, slots=True)
class ExperimentRecord:
    """An experiment as stored; `epoch` counts its changes of arms, weights or salt, from 1."""

    name: str
    config: dict[str, Any]
    epoch: int
    created: float


class ExperimentStore:
    """All access to the database. Safe to use from several threads, processes and machines."""

    def __init__(self, url: str):
        """Connect and create missing tables. MarlRayError unless the URL is of a usable SQLite or PostgreSQL."""
        try:
            parsed = sa.make_url(url)
        except SQLAlchemyError as error:
            raise MarlRayError(
                f"database: expected an SQLAlchemy URL such as sqlite:///runs/experiments.db, got {url!r}"
            ) from error
        kind = parsed.get_backend_name()
        shown = parsed.render_as_string(hide_password=True)
        if kind == "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise MarlRayError("database: SQLite needs a file, such as sqlite:///runs/experiments.db")
            arguments: dict[str, Any] = {"timeout": BUSY_S}
            self._insert: Any = sqlite.insert
        elif kind == "postgresql":
            arguments = {"connect_timeout": int(BUSY_S), "options": f"-c lock_timeout={int(BUSY_S * 1000)}"}
            self._insert = postgresql.insert
        else:
            raise MarlRayError(f"database: expected sqlite or postgresql, got {kind!r}")
        try:
            if kind == "sqlite":
                Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
            self._engine = sa.create_engine(parsed, connect_args=arguments, pool_timeout=BUSY_S)
            if kind == "sqlite":
                sa.event.listen(self._engine, "connect", _set_sqlite_pragmas)
            self._create_tables()
        except (SQLAlchemyError, OSError, ImportError) as error:
            raise MarlRayError(f"database {shown!r} cannot be opened: {one_line(error)}") from error

    def _create_tables(self) -> None:
        # Replicas start together: the one that loses the race finds the tables made.
        for attempt in range(5):
            try:
                _metadata.create_all(self._engine)
                return
            except (sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError):
                if attempt == 4:
                    raise
                time.sleep(0.1 * (attempt + 1))

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"experiment store: {one_line(error)}") from error

    def open_experiment(self, name: str, config: dict[str, Any]) -> ExperimentRecord:
        """Create the experiment, or take it up again with this config, a later epoch if assignment changed.

        `config` is plain data with `salt` and `arms` (name -> {"digest", "weight", ...}). An arm that has exposures
        must stay and keep its digest, else its outcomes would be of two things: MarlRayError.
        """
        with self._transaction() as connection:
            # The insert comes first because it takes the write lock: of two replicas one waits here.
            row = {"name": name, "config": config, "epoch": 1, "created": time.time()}
            connection.execute(self._insert(_experiments).values(row).on_conflict_do_nothing())
            found = connection.execute(_select_experiment(name).with_for_update()).one()
            if found.config == config:
                return ExperimentRecord(*found)
            self._check_arms_kept(connection, name, found.config["arms"], config["arms"])
            epoch = found.epoch + (_assignment_part(found.config) != _assignment_part(config))
            change = sa.update(_experiments).where(_experiments.c.name == name).values(config=config, epoch=epoch)
            connection.execute(change)
            return ExperimentRecord(name, config, epoch, found.created)

    def _check_arms_kept(self, connection: sa.Connection, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        for arm, before in old.items():
            if arm in new and new[arm]["digest"] == before["digest"]:
                continue
            one = sa.select(_exposures.c.unit).where(_exposures.c.experiment == name, _exposures.c.arm == arm).limit(1)
            if connection.execute(one).first() is None:
                continue
            what = "another bundle" if arm in new else "no such arm"
            raise MarlRayError(
                f"experiment {name!r}: arm {arm!r} already has sessions with bundle {before['digest'][:16]}, "
                f"the config has {what}; set its weight to 0, or start an experiment with a new name"
            )

    def experiment(self, name: str) -> ExperimentRecord | None:
        """The stored experiment, or None."""
        with self._transaction() as connection:
            row = connection.execute(_select_experiment(name)).first()
        return ExperimentRecord(*row) if row else None

    def record_exposures(self, exposures: Sequence[Exposure]) -> None:
        """Write exposures in one transaction; units that already have one keep it."""
        if not exposures:
            return
        rows = [
            {
                "experiment": e.experiment,
                "unit": e.unit,
                "arm": e.assignment.arm,
                "epoch": e.assignment.epoch,
                "propensity": e.assignment.propensity,
                "first_at": e.at,
            }
            for e in exposures
        ]
        with self._transaction() as connection:
            connection.execute(self._insert(_exposures).on_conflict_do_nothing(), rows)

    def assignment(self, experiment: str, unit: str) -> Assignment | None:
        """The arm of the unit's first exposure, or None."""
        columns = sa.select(_exposures.c.arm, _exposures.c.epoch, _exposures.c.propensity)
        with self._transaction() as connection:
            row = connection.execute(columns.where(*_is(_exposures, experiment, unit))).first()
        return Assignment(*row) if row else None

    def record_outcome(self, experiment: str, unit: str, value: float) -> Assignment:
        """Store a unit's outcome and return whose it is.

        The same value again changes nothing. Raises UnknownUnitError for a unit without an exposure and
        OutcomeConflictError for a second value.
        """
        assignment = self.assignment(experiment, unit)
        if assignment is None:
            raise UnknownUnitError(f"session_id: {unit!r} has no exposure in experiment {experiment!r}")
        row = {"experiment": experiment, "unit": unit, "value": value, "at": time.time()}
        with self._transaction() as connection:
            if connection.execute(self._insert(_outcomes).values(row).on_conflict_do_nothing()).rowcount:
                return assignment
            stored = sa.select(_outcomes.c.value).where(*_is(_outcomes, experiment, unit))
            known = connection.execute(stored).scalar_one()
        if known != value:
            raise OutcomeConflictError(f"value: session {unit!r} already has outcome {known!r}, got {value!r}")
        return assignment

    def summary(self, name: str) -> dict[str, ArmSummary]:
        """Arm -> exposures and outcomes, of the arms that have any."""
        same_unit = sa.and_(*(_outcomes.c[key] == _exposures.c[key] for key in ("experiment", "unit")))
        # One statement, hence one moment: two could count an outcome and not its exposure.
        units = (
            sa.select(_exposures.c.arm, _outcomes.c.value)
            .outerjoin(_outcomes, same_unit)
            .where(_exposures.c.experiment == name)
            .cte("units")
        )
        value = units.c.value
        counts = (sa.func.count().label("exposures"), sa.func.count(value).label("n"), sa.func.avg(value).label("mean"))
        centre = sa.select(units.c.arm, *counts).group_by(units.c.arm).cte("centre")
        # Squares of deviations from the mean: a sum of raw squares loses all digits where the mean is large.
        squares = sa.func.sum((value - centre.c.mean) * (value - centre.c.mean)).label("squares")
        keys = (centre.c.arm, centre.c.exposures, centre.c.n, centre.c.mean)
        query = sa.select(*keys, squares).join(units, units.c.arm == centre.c.arm).group_by(*keys)
        with self._transaction() as connection:
            return {row.arm: _summary_of(row) for row in connection.execute(query)}


def _summary_of(row: Any) -> ArmSummary:
    if not row.n:
        return ArmSummary(row.exposures, Summary(0, math.nan, 0.0))
    variance = float(row.squares) / (row.n - 1) if row.n > 1 else 0.0
    return ArmSummary(row.exposures, Summary(row.n, float(row.mean), variance))


def _select_experiment(name: str) -> Any:
    columns = (_experiments.c.name, _experiments.c.config, _experiments.c.epoch, _experiments.c.created)
    return sa.select(*columns).where(_experiments.c.name == name)


def _is(table: sa.Table, experiment: str, unit: str) -> tuple[Any, Any]:
    return table.c.experiment == experiment, table.c.unit == unit


def _assignment_part(config: dict[str, Any]) -> Any:
    return config["salt"], {arm: (part["digest"], part["weight"]) for arm, part in config["arms"].items()}


def _set_sqlite_pragmas(connection: Any, _: Any) -> None:
    # WAL lets readers and the writer work at the same time; with it, NORMAL loses nothing when a process dies and at
    # most the last commits when the machine does.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
