"""The experiment store: what was configured, who was exposed to what, and what came of it, in a SQL database.

Rules that the database itself keeps, whatever processes do: a unit has one exposure per experiment, the first, for
good; one outcome at most, and one value of each metric, which a repeated post cannot change; a rolled-back arm keeps
its mark; the audit only grows, in the transactions of the changes that it tells of.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from marl_ray.errors import MarlRayError
from marl_ray.experiments import schema
from marl_ray.experiments.states import (
    RETREATS,
    Action,
    ExperimentRecord,
    StaleEpochError,
    State,
    Status,
    plan_of,
    reconfigured,
    shadows_of,
    transition,
    weights_of,
)
from marl_ray.experiments.units import (
    ArmSummary,
    Exposure,
    Outcome,
    OutcomeConflictError,
    StoreError,
    UnitStore,
    UnknownUnitError,
)

__all__ = [
    "ArmSummary",
    "AssignmentState",
    "AuditEntry",
    "ExperimentRecord",
    "ExperimentStore",
    "Exposure",
    "Outcome",
    "OutcomeConflictError",
    "StaleEpochError",
    "StoreError",
    "UnknownUnitError",
]


@dataclass(frozen=True, slots=True)
class AssignmentState:
    """What a gateway needs to assign units now."""

    experiment: str
    epoch: int
    status: Status
    stage: int
    weights: dict[str, float]
    control: str
    salt: str
    shadows: tuple[str, ...]
    """Arms that get a copy of the traffic."""
    rolled_back: frozenset[str]
    cut: bool
    """Units already with a rolled-back arm go on with the control."""
    layer: str | None
    layer_share: tuple[float, float]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change. `before` and `after` are the experiment as plain data, `before` is None for the first entry."""

    id: int
    experiment: str
    at: float
    actor: str
    action: str
    arm: str | None
    reason: str
    epoch: int
    before: dict[str, Any] | None
    after: dict[str, Any]


class ExperimentStore(UnitStore):
    """All access to the database. Safe to use from several threads, processes and machines."""

    def open_experiment(
        self, name: str, config: dict[str, Any], *, actor: str = "config", reason: str = "opened"
    ) -> ExperimentRecord:
        """Create the experiment, or take it up again with this config, a later epoch if assignment changed.

        `config` is plain data with `salt` and `arms` (name -> {"digest", "weight", ...}), and the other keys of
        `ExperimentConfig` as far as they are not the defaults of a plain A/B test. MarlRayError if an arm that has
        exposures is missing or has another digest (its outcomes would be of two things), if the control or a changed
        arm has been rolled back, or if an arm with weight has a digest that another experiment has rolled back and
        lacks `allow_rolled_back` (what already runs is not stopped by that). An arm that this experiment has rolled
        back, by name or digest, may stay: the record's `kept_at_zero` names it.
        """
        with self._transaction(self._writer) as connection:
            now = time.time()
            status = Status.RUNNING if config.get("autostart", True) else Status.DRAFT
            row = {"name": name, "config": config, "created": now, **_columns(State(status, stage_since=now))}
            # The insert comes first because it takes the write lock: of two replicas one waits here.
            fresh = self._is_new(connection, schema.experiments, row)
            found = _read(connection, name, lock=True)
            assert found is not None
            if found.config == config and not fresh:
                return found
            if not fresh:
                self._check_arms_kept(connection, name, found.config["arms"], config["arms"])
            self._register_arms(connection, name, config["arms"], now)
            plan = plan_of(config)
            # Read again: an arm that is new by name alone has just got its mark.
            state = replace(found.state, rolled_back=_marked(connection, name))
            allowed: dict[str, str] = {}
            if fresh or _assignment_part(found.config) != _assignment_part(config):
                allowed = _allowed(connection, name, config, {} if fresh else found.config["arms"])
            if _assignment_part(found.config) != _assignment_part(config):
                state = reconfigured(state, found.plan, plan, now)
            record = ExperimentRecord(name, config, found.created, state, plan)
            values = {"config": config, **_columns(state)}
            connection.execute(sa.update(schema.experiments).where(schema.experiments.c.name == name).values(values))
            old = None if fresh else {**_plain(found), "config": found.config}
            self._audit(connection, record, "open", actor, reason, now, old, {**_plain(record), "config": config})
            for arm, elsewhere in allowed.items():
                told = f"allow_rolled_back: bundle rolled back in experiment {elsewhere!r}"
                self._audit(connection, record, "allow_rolled_back", actor, told, now, None, _plain(record), arm)
            return record

    def _check_arms_kept(self, connection: sa.Connection, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        exposed = schema.exposures.c
        for arm, before in old.items():
            if arm in new and new[arm]["digest"] == before["digest"]:
                continue
            one = sa.select(exposed.unit).where(exposed.experiment == name, exposed.arm == arm).limit(1)
            if connection.execute(one).first() is None:
                continue
            what = "another bundle" if arm in new else "no such arm"
            raise MarlRayError(
                f"experiment {name!r}: arm {arm!r} already has sessions with bundle {before['digest'][:16]}, "
                f"the config has {what}; set its weight to 0, or start an experiment with a new name"
            )

    def _register_arms(self, connection: sa.Connection, name: str, given: dict[str, Any], now: float) -> None:
        """Note the arms that are new or have a new digest; one that this experiment has rolled back is marked again."""
        arms = schema.arms.c
        known = {row.arm: row for row in connection.execute(sa.select(schema.arms).where(arms.experiment == name))}
        barred = {row.digest: row.arm for row in known.values() if row.rolled_back_at is not None}
        for arm, part in given.items():
            digest, row = part["digest"], known.get(arm)
            if row is not None and row.digest == digest:
                continue
            if row is not None and row.rolled_back_at is not None:
                raise MarlRayError(
                    f"experiment {name!r}: arm {arm!r} has been rolled back with bundle {row.digest[:16]}; "
                    "expected a new arm name for another bundle"
                )
            values: dict[str, Any] = {"digest": digest, "rolled_back_at": None, "reason": None}
            if digest in barred:
                values |= {"rolled_back_at": now, "reason": f"the bundle of rolled-back arm {barred[digest]!r}"}
            insert = self._insert(schema.arms).values(experiment=name, arm=arm, **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["experiment", "arm"], set_=values))

    def change(
        self, name: str, action: Action, *, epoch: int | None, actor: str, reason: str, arm: str | None = None
    ) -> ExperimentRecord:
        """Do an action (see `states.transition`) with its audit entry, and return what the experiment is then.

        `epoch` is the one it was decided on: StaleEpochError, and no change, if it is over. None means any, for actions
        that only take traffic from treatments (`states.RETREATS`). Rolling back again what is rolled back writes
        nothing. Raises MarlRayError if the experiment is unknown, if the action is not possible now, or if it might give
        traffic to a bundle that another experiment has rolled back.
        """
        if epoch is None and action not in RETREATS:
            raise MarlRayError(f"epoch: expected the epoch that {action} was decided on")
        with self._transaction(self._writer) as connection:
            found = _read(connection, name, lock=True)
            if found is None:
                raise MarlRayError(f"experiment: unknown experiment {name!r}")
            if epoch is not None and epoch != found.epoch:
                raise StaleEpochError(f"epoch: {action} was decided on epoch {epoch}, {name!r} is at {found.epoch}")
            if action not in RETREATS:
                _allowed(connection, name, found.config, found.config["arms"])
            now = time.time()
            state = transition(found.state, action, found.plan, now, arm)
            if state == found.state:
                return found
            record = ExperimentRecord(name, found.config, found.created, state, found.plan)
            marked = state.rolled_back - found.state.rolled_back
            if marked:
                arms = schema.arms.c
                mark = sa.update(schema.arms).where(arms.experiment == name, arms.arm.in_(sorted(marked)))
                connection.execute(mark.values(rolled_back_at=now, reason=reason))
            update = sa.update(schema.experiments).where(schema.experiments.c.name == name)
            connection.execute(update.values(_columns(state)))
            self._audit(connection, record, action.value, actor, reason, now, _plain(found), _plain(record), arm)
            return record

    def _audit(
        self,
        connection: sa.Connection,
        record: ExperimentRecord,
        action: str,
        actor: str,
        reason: str,
        now: float,
        before: dict[str, Any] | None,
        after: dict[str, Any],
        arm: str | None = None,
    ) -> None:
        who = {"experiment": record.name, "at": now, "actor": actor, "action": action, "arm": arm, "reason": reason}
        values = {**who, "epoch": record.epoch, "before": before, "after": after}
        connection.execute(sa.insert(schema.audit).values(values))

    def audit(self, name: str) -> list[AuditEntry]:
        """Every change of the experiment, the oldest first."""
        query = sa.select(schema.audit).where(schema.audit.c.experiment == name).order_by(schema.audit.c.id)
        with self._transaction() as connection:
            return [AuditEntry(*row) for row in connection.execute(query)]

    def experiment(self, name: str) -> ExperimentRecord | None:
        """The stored experiment, or None."""
        with self._transaction() as connection:
            return _read(connection, name)

    def table(self, name: str) -> AssignmentState:
        """How units are assigned now; one short query, to be polled. MarlRayError if the experiment is unknown."""
        record = self.experiment(name)
        if record is None:
            raise MarlRayError(f"experiment: unknown experiment {name!r}")
        state, config = record.state, record.config
        low, high = config.get("layer_share", (0.0, 1.0))
        return AssignmentState(
            experiment=name,
            epoch=state.epoch,
            status=state.status,
            stage=state.stage,
            weights=weights_of(record.plan, state),
            control=record.plan.control,
            salt=config["salt"],
            shadows=shadows_of(record.plan, state),
            rolled_back=state.rolled_back,
            cut=config.get("on_rollback") == "cut",
            layer=config.get("layer"),
            layer_share=(low, high),
        )


def _read(connection: sa.Connection, name: str, lock: bool = False) -> ExperimentRecord | None:
    here, arms = schema.experiments, schema.arms.c
    if lock:
        # A statement of its own: the next one then sees the marks of the change that it waited for.
        # Key share lets exposures in, whose foreign keys hold the row too.
        connection.execute(sa.select(here.c.name).where(here.c.name == name).with_for_update(key_share=True))
    is_marked = sa.and_(arms.experiment == here.c.name, arms.rolled_back_at.is_not(None))
    query = sa.select(here, arms.arm.label("marked")).outerjoin(schema.arms, is_marked).where(here.c.name == name)
    rows = connection.execute(query).all()
    if not rows:
        return None
    row = rows[0]
    state = State(
        status=Status(row.status),
        epoch=row.epoch,
        stage=row.stage,
        stage_since=row.stage_since,
        stage_epoch=row.stage_epoch,
        winner=row.winner,
        rolled_back=frozenset(row.marked for row in rows if row.marked is not None),
    )
    return ExperimentRecord(name, row.config, row.created, state, plan_of(row.config))


def _marked(connection: sa.Connection, name: str) -> frozenset[str]:
    arms = schema.arms.c
    marked = sa.select(arms.arm).where(arms.experiment == name, arms.rolled_back_at.is_not(None))
    return frozenset(connection.execute(marked).scalars())


def _allowed(connection: sa.Connection, name: str, config: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
    """Arm -> another experiment, for the arms with weight whose bundle that one has rolled back and which the config
    allows, unless it did so `before` (the arms of the earlier config). MarlRayError for one that is not allowed."""
    mine, other = schema.arms.alias().c, schema.arms.alias().c
    marked = sa.and_(other.digest == mine.digest, other.experiment != name, other.rolled_back_at.is_not(None))
    query = sa.select(mine.arm, mine.digest, sa.func.min(other.experiment).label("elsewhere")).where(marked)
    query = query.where(mine.experiment == name, mine.rolled_back_at.is_(None)).group_by(mine.arm, mine.digest)
    allowed: dict[str, str] = {}
    for row in connection.execute(query):
        part, known = config["arms"].get(row.arm), before.get(row.arm, {})
        kept = known.get("digest") == row.digest
        # An experiment that runs needs its control, wherever that may have failed as a treatment.
        if part is None or not part["weight"] > 0 or (kept and row.arm == plan_of(config).control):
            continue
        if not part.get("allow_rolled_back", False):
            raise MarlRayError(
                f"experiment {name!r}: arms.{row.arm}: bundle {row.digest[:16]} has been rolled back in experiment "
                f"{row.elsewhere!r}; expected another bundle, weight 0, or allow_rolled_back: true"
            )
        if not (kept and known.get("allow_rolled_back", False)):
            allowed[row.arm] = row.elsewhere
    return allowed


def _columns(state: State) -> dict[str, Any]:
    """The state as columns; its marks are rows of the arms."""
    return {
        "status": state.status.value,
        "epoch": state.epoch,
        "stage": state.stage,
        "stage_since": state.stage_since,
        "stage_epoch": state.stage_epoch,
        "winner": state.winner,
    }


def _plain(record: ExperimentRecord) -> dict[str, Any]:
    """What the audit keeps of a state."""
    return {**_columns(record.state), "weights": record.weights, "rolled_back": sorted(record.state.rolled_back)}


def _assignment_part(config: dict[str, Any]) -> Any:
    """What decides which unit gets what; a change of it is a new epoch."""
    plan = plan_of(config)
    digests = {arm: (part["digest"], part.get("allow_rolled_back", False)) for arm, part in config["arms"].items()}
    layer = config.get("layer"), list(config.get("layer_share", (0.0, 1.0)))
    return config["salt"], digests, plan.weights, plan.control, plan.strategy, plan.stages, layer
