"""Experiments as the store returns them, and the conversion of rows to them and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from marl_ray.config.serving.guardrails import counts_as
from marl_ray.errors import MarlRayError, describe_error
from marl_ray.experiments.assignment.population import EVERYONE, Population, population_of
from marl_ray.experiments.database import schema
from marl_ray.experiments.database.windows import WINDOW_S
from marl_ray.experiments.evidence.running_sums import LookSettings
from marl_ray.experiments.lifecycle import (
    FINAL_STATUSES,
    Allocation,
    ExperimentRecord,
    ExperimentState,
    ExperimentStatus,
    plan_of,
    shadows_of,
    weights_of,
)

Configs = dict[str, tuple[int, dict[str, Any]]]
"""Experiment -> the revision of its config, and the config."""


class UnreadableExperimentError(MarlRayError):
    """The error of an experiment that another version has stored, in a form that this one cannot read."""


@dataclass(frozen=True, slots=True)
class AssignmentState:
    """The part of an experiment that a gateway needs to assign units."""

    experiment: str
    epoch: int
    """Grows with every change of the state, from 1."""
    status: ExperimentStatus
    stage: int
    """Stage of the ramp, from 0."""
    weights: dict[str, float]
    """Arm -> relative weight of new units."""
    control: str
    salt: str
    """Text that is hashed with a unit, so that experiments assign independently."""
    shadows: tuple[str, ...]
    """Arms that get a copy of the traffic."""
    rolled_back: frozenset[str]
    """Arms that get no unit any more."""
    on_rollback: Literal["cut", "drain"]
    """Units already in a rolled-back arm continue with the control (`cut`) or finish there (`drain`)."""
    layer: str | None
    """Name of the layer in which experiments share units; None if it is in none."""
    layer_share: tuple[float, float]
    """Begin and end of its part of the layer, in [0, 1]."""
    endpoint: str
    """The name that clients act on."""
    randomize: str
    """`session`, `cluster` or `switchback`."""
    block_s: float
    """Length of a block of a switchback, in seconds."""
    created: float
    """Seconds since 1970."""
    population: Population = EVERYONE
    """The units of the layer's share that take part."""
    origin: str | None = None
    """Creator of the experiment: `api`, or None for the config of a gateway."""

    @property
    def is_over(self) -> bool:
        """True if the experiment has ended: it is promoted, rolled back or stopped."""
        return self.status in FINAL_STATUSES

    @property
    def assigning_arms(self) -> frozenset[str]:
        """The control, and the arms that new units are assigned to."""
        return frozenset({self.control, *(arm for arm, weight in self.weights.items() if weight > 0)})

    @property
    def production(self) -> str:
        """The arm that answers units outside of the experiment: the promoted winner, else the control."""
        if self.status is not ExperimentStatus.PROMOTED:
            return self.control
        return next((arm for arm, weight in self.weights.items() if weight > 0), self.control)


class EpochHistory(NamedTuple):
    """Weights and populations of all epochs so far."""

    weights: list[Mapping[str, float]]
    """Weights of the epochs, in order."""
    populations: frozenset[Population]
    """Populations from which units have been taken."""


@dataclass(frozen=True, slots=True)
class Production:
    """The bundle that serves an endpoint's clients who are in no open experiment."""

    experiment: str
    arm: str
    bundle: str
    """Reference to the bundle, as in the experiment's config."""
    digest: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change of an experiment.

    `before` and `after` are its state as plain data; `before` is None for the first entry.
    """

    id: int
    """Rises with every entry of the database."""
    experiment: str
    at: float
    """Seconds since 1970."""
    actor: str
    """The person, or the part of the gateway, that made the change."""
    action: str
    """Kind of the change, such as `reallocate`."""
    arm: str | None
    """The arm that it was done to; None if it concerns all."""
    reason: str
    epoch: int
    """The epoch after the change."""
    before: dict[str, Any] | None
    after: dict[str, Any]


def read_experiment(connection: sa.Connection, name: str, lock: bool = False) -> ExperimentRecord | None:
    """Return one experiment, or None if there is no such experiment.

    With `lock`, nobody else changes it until the transaction is over. Raises UnreadableExperimentError.
    """
    experiments = schema.experiments.c
    if lock:
        # A statement of its own: the next one then sees the marks of the change that it waited for.
        # Key share lets exposures in, whose foreign keys hold the row too.
        connection.execute(sa.select(experiments.name).where(experiments.name == name).with_for_update(key_share=True))
    rows = _rows(connection, (experiments.config,), [name])
    return _record(rows[name], rows[name][0].config) if rows else None


def read_states(
    connection: sa.Connection, configs: Configs, skip: Callable[[UnreadableExperimentError], None]
) -> dict[str, AssignmentState]:
    """Return experiment -> its assignment state, the oldest first.

    Only configs newer than in `configs` are read, and `configs` is brought up to date. An experiment that this version
    cannot read hides no other: `skip` is called with its error.
    """
    rows = _rows(connection, ())
    stale = [name for name, (row, *_) in rows.items() if configs.get(name, (0, {}))[0] != row.revision]
    if stale:
        # State and config of one statement: a state may have changed with its config since the last one.
        fresh = _rows(connection, (schema.experiments.c.config,), stale)
        rows |= fresh
        configs.update({name: (row.revision, row.config) for name, (row, *_) in fresh.items()})
    states = {}
    for name, rows_of_experiment in rows.items():
        try:
            states[name] = assignment_state(_record(rows_of_experiment, configs[name][1]))
        except UnreadableExperimentError as error:
            skip(error)
    return states


def version_of(connection: sa.Connection) -> tuple[int, int]:
    """Return the number of experiments, and the sum of their epochs and revisions.

    Equal versions mean that nothing has changed, because every change raises one of the two. The query reads one row,
    however many experiments are over.
    """
    experiments = schema.experiments.c
    changes = sa.func.coalesce(sa.func.sum(experiments.epoch + experiments.revision), 0)
    count, total = connection.execute(sa.select(sa.func.count(), changes)).one()
    return int(count), int(total)


def _rows(
    connection: sa.Connection, more: Iterable[sa.ColumnElement[Any]], names: list[str] | None = None
) -> dict[str, list[Any]]:
    """Return experiment -> its row, once for every mark on an arm."""
    experiments, arms = schema.experiments.c, schema.arms.c
    columns = (
        experiments.name,
        experiments.epoch,
        experiments.created,
        experiments.status,
        experiments.stage,
        experiments.stage_since,
        experiments.stage_epoch,
    )
    marked = sa.and_(arms.experiment == experiments.name, arms.rolled_back_at.is_not(None))
    query = sa.select(
        *columns, experiments.winner, experiments.allocation, experiments.revision, *more, arms.arm.label("marked")
    )
    query = (
        query.select_from(schema.experiments)
        .outerjoin(schema.arms, marked)
        .order_by(experiments.created, experiments.name)
    )
    by_name: dict[str, list[Any]] = {}
    for row in connection.execute(query if names is None else query.where(experiments.name.in_(names))):
        by_name.setdefault(row.name, []).append(row)
    return by_name


@contextmanager
def _naming_experiment(name: str) -> Iterator[None]:
    """Turn the errors of an experiment's stored data within the block into an UnreadableExperimentError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnreadableExperimentError(
            f"experiment {name!r}: this version cannot read what is stored of it: {describe_error(error)}"
        ) from error


def _record(rows: list[Any], config: dict[str, Any]) -> ExperimentRecord:
    row = rows[0]
    with _naming_experiment(row.name):
        state = ExperimentState(
            status=ExperimentStatus(row.status),
            epoch=row.epoch,
            stage=row.stage,
            stage_since=row.stage_since,
            stage_epoch=row.stage_epoch,
            winner=row.winner,
            rolled_back=frozenset(row.marked for row in rows if row.marked is not None),
            allocation=None if row.allocation is None else Allocation(**row.allocation),
        )
        return ExperimentRecord(row.name, config, row.created, state, plan_of(config))


def assignment_state(record: ExperimentRecord) -> AssignmentState:
    """Return the assignment state of an experiment. Raises UnreadableExperimentError."""
    state, config = record.state, record.config
    with _naming_experiment(record.name):
        low, high = config.get("layer_share", (0.0, 1.0))
        return AssignmentState(
            experiment=record.name,
            epoch=state.epoch,
            status=state.status,
            stage=state.stage,
            weights=weights_of(record.plan, state),
            control=record.plan.control,
            salt=config["salt"],
            shadows=shadows_of(record.plan, state),
            rolled_back=state.rolled_back,
            on_rollback=config.get("on_rollback", "cut"),
            layer=config.get("layer"),
            layer_share=(low, high),
            endpoint=endpoint_of(record.name, config),
            randomize=randomization_of(config),
            block_s=config.get("block_s", 600.0),
            created=record.created,
            population=population_of(config),
            origin=config.get("origin"),
        )


def endpoint_of(name: str, config: dict[str, Any]) -> str:
    """Return the endpoint that an experiment serves: that of its config, or else its own name."""
    return config.get("endpoint") or name


def randomization_of(config: dict[str, Any]) -> str:
    """Return the kind of thing that is assigned to an arm: `session`, `cluster` or `switchback`."""
    return str(config.get("randomize", "session"))


def look_settings(config: dict[str, Any]) -> LookSettings:
    """Return the part of a config that looks depend on.

    A unit without a reported failure (`error`) counts as one without failure, because the gateway itself reports failures,
    whether a guardrail reads them or not.
    """
    rails = {rail["name"]: counts_as(rail["name"], rail.get("missing")) for rail in config.get("guardrails", ())}
    missing = {"error": 0.0} | rails | {"outcome": counts_as("outcome", config.get("missing"))}
    measures = {rail["name"]: rail for rail in config.get("guardrails", ())} | {"outcome": config}
    limits = {metric: measure.get("bounds") or measure.get("winsorize") for metric, measure in measures.items()}
    ranges = {metric: (float(limit[0]), float(limit[1])) for metric, limit in limits.items() if limit}
    for metric, (low, high) in ranges.items():
        value = missing.get(metric)
        missing[metric] = None if value is None else min(max(value, low), high)
    return LookSettings(
        randomization_of(config),
        config.get("washout_s", 0.0),
        config.get("block_s", 600.0),
        config.get("outcome_window_s", WINDOW_S),
        tuple(sorted((metric, value) for metric, value in missing.items() if value is not None)),
        tuple(sorted((metric, *limit) for metric, limit in ranges.items())),
    )


def columns_of(state: ExperimentState) -> dict[str, Any]:
    """Return the state as columns; its marks are rows of the arms."""
    return {
        "status": state.status.value,
        "epoch": state.epoch,
        "stage": state.stage,
        "stage_since": state.stage_since,
        "stage_epoch": state.stage_epoch,
        "winner": state.winner,
        "allocation": None if state.allocation is None else asdict(state.allocation),
    }


def audited_state(record: ExperimentRecord) -> dict[str, Any]:
    """Return the state as plain data for the audit, with the weights in force."""
    return {**columns_of(record.state), "weights": record.weights, "rolled_back": sorted(record.state.rolled_back)}


def assignment_part(config: dict[str, Any]) -> Any:
    """Return the part of a config that decides which unit gets which arm.

    A change of it is a new epoch.
    """
    plan, randomize = plan_of(config), randomization_of(config)
    digests = {arm: (part["digest"], part.get("allow_rolled_back", False)) for arm, part in config["arms"].items()}
    layer = config.get("layer"), list(config.get("layer_share", (0.0, 1.0)))
    blocks = config.get("block_s") if randomize == "switchback" else None
    units = layer, population_of(config), randomize, blocks
    return config["salt"], digests, plan.weights, plan.control, plan.strategy, plan.stages, units
