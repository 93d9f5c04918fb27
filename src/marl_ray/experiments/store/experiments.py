"""The store of experiments: their configs and states, and the audit of every change."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.population import population_of
from marl_ray.experiments.database import schema
from marl_ray.experiments.database.connections import Database
from marl_ray.experiments.lifecycle import (
    OPEN_STATUSES,
    RETREATS,
    Action,
    ExperimentRecord,
    ExperimentState,
    ExperimentStatus,
    StaleEpochError,
    plan_of,
    state_under_config,
    state_under_weights,
    transition,
)
from marl_ray.experiments.store.records import (
    AssignmentState,
    AuditEntry,
    Configs,
    EpochHistory,
    Production,
    UnreadableExperimentError,
    assignment_part,
    assignment_state,
    audited_state,
    columns_of,
    endpoint_of,
    read_experiment,
    read_states,
    version_of,
)
from marl_ray.experiments.store.rules import (
    allowed_arms,
    check_arms_kept,
    check_endpoint,
    check_settings_kept,
    marked_arms,
    twin_treatments,
)
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS

_ENDPOINTS = 0x6D61_7265
"""First key of PostgreSQL's advisory locks on endpoints."""

_log = logging.getLogger(__name__)


class ExperimentStore:
    """Experiments and their changes. Safe to use from several threads, processes and machines.

    Every method may raise StoreError.
    """

    def __init__(self, database: Database):
        self._database = database
        self._configs: Configs = {}
        self._states: tuple[tuple[int, int], dict[str, AssignmentState]] = (-1, -1), {}
        self._logged_errors: set[str] = set()
        """Errors of experiments that cannot be read, each of which the log has once."""

    def open(
        self,
        name: str,
        config: dict[str, Any],
        *,
        actor: str = "config",
        reason: str = "opened",
        succeeds: str | None = None,
    ) -> ExperimentRecord:
        """Create the experiment, or continue it under this config, which is a later epoch if assignment changed.

        `config` is plain data with `salt` and `arms` (name -> {"digest", "weights_sha256", "weight", ...}; without the
        second an arm is known by its bundle's digest alone), and the other keys of `ExperimentConfig` as far as they are
        not the defaults of a plain A/B test. An arm that this experiment has rolled back, by name, digest or weights, may
        stay: the record's `kept_at_zero` names it. A new experiment may name one that it `succeeds` at its endpoint, which
        is stopped in the same transaction: it goes on if the new one is refused.

        Raises MarlRayError for each of these:
        - an arm that has exposures is missing, or has another digest: its outcomes would be of two things
        - the control, or a changed arm, was rolled back
        - an arm with weight has a digest or weights that another experiment has rolled back, and lacks `allow_rolled_back`;
          what already runs continues
        - the endpoint has another open experiment, and the two share no layer
        - the experiment that it succeeds is not open, is at another endpoint, or has several arms, which it compares
        - `randomize` or `outcome_window_s` changes after the first exposure
        """
        with self._database.write_transaction() as connection:
            now, endpoint = time.time(), endpoint_of(name, config)
            if connection.dialect.name == "postgresql":
                # Each checks the experiments that the others open, so one opens at a time; SQLite has one writer anyway.
                key = sa.func.hashtext(endpoint)
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ENDPOINTS, key)))
            status = ExperimentStatus.RUNNING if config.get("autostart", True) else ExperimentStatus.DRAFT
            row = {
                "name": name,
                "config": config,
                "endpoint": endpoint,
                "created": now,
                **columns_of(ExperimentState(status, stage_since=now)),
            }
            # The insert comes first because it takes the write lock: of two replicas one waits here.
            # Its row count does not tell: SQLAlchemy does not know that of PostgreSQL's inserts (it says -1).
            insert = self._database.insert(schema.experiments).values(row).on_conflict_do_nothing()
            fresh = connection.execute(insert.returning(sa.literal(1))).first() is not None
            stored = read_experiment(connection, name, lock=True)
            assert stored is not None
            if fresh and succeeds is not None:
                self._stop_predecessor(connection, succeeds, name, endpoint, actor, now)
            if stored.config == config and not fresh:
                return stored
            if not fresh:
                check_settings_kept(connection, name, stored.config, config)
                check_arms_kept(connection, name, stored.config["arms"], config["arms"])
            self._register_arms(connection, name, config["arms"], now)
            plan = plan_of(config)
            # Read again: an arm that is new by name alone has just got its mark.
            state = replace(stored.state, rolled_back=marked_arms(connection, name))
            allowed: dict[str, str] = {}
            if fresh or assignment_part(stored.config) != assignment_part(config):
                allowed = allowed_arms(connection, name, config, {} if fresh else stored.config["arms"])
            if assignment_part(stored.config) != assignment_part(config):
                state = state_under_config(state, stored.plan, plan, now)
            record = ExperimentRecord(name, config, stored.created, state, plan)
            check_endpoint(connection, record, endpoint)
            experiments = schema.experiments.c
            values = {"config": config, "endpoint": endpoint, "revision": experiments.revision + 1, **columns_of(state)}
            connection.execute(sa.update(schema.experiments).where(experiments.name == name).values(values))
            old = None if fresh else {**audited_state(stored), "config": stored.config}
            self._audit(
                connection, record, "open", actor, reason, now, old, {**audited_state(record), "config": config}
            )
            for arm, other_experiment in allowed.items():
                note = f"allow_rolled_back: bundle rolled back in experiment {other_experiment!r}"
                self._audit(connection, record, "allow_rolled_back", actor, note, now, None, audited_state(record), arm)
            return record

    def _stop_predecessor(
        self, connection: sa.Connection, name: str, successor: str, endpoint: str, actor: str, now: float
    ) -> None:
        """Stop the experiment that another one succeeds. Raises MarlRayError unless it is open, and serves one arm there."""
        stored = read_experiment(connection, name, lock=True)
        if (
            stored is None
            or stored.state.status not in OPEN_STATUSES
            or endpoint_of(name, stored.config) != endpoint
            or len(stored.config["arms"]) > 1
        ):
            raise MarlRayError(f"succeeds: expected an open experiment of one arm at {endpoint!r}, got {name!r}")
        record = replace(stored, state=transition(stored.state, Action.STOP, stored.plan, now))
        self._write_action(connection, stored, record, Action.STOP, actor, f"succeeded by {successor!r}", now)

    def _write_action(
        self,
        connection: sa.Connection,
        stored: ExperimentRecord,
        record: ExperimentRecord,
        action: Action,
        actor: str,
        reason: str,
        now: float,
        arm: str | None = None,
    ) -> None:
        """Write an experiment's state after an action, and the audit entry."""
        update = sa.update(schema.experiments).where(schema.experiments.c.name == record.name)
        connection.execute(update.values(columns_of(record.state)))
        self._audit(
            connection, record, action.value, actor, reason, now, audited_state(stored), audited_state(record), arm
        )

    def _register_arms(self, connection: sa.Connection, name: str, arm_configs: dict[str, Any], now: float) -> None:
        """Note the arms that are new or have a new digest.

        One whose bundle this experiment has rolled back is marked again.
        """
        arms = schema.arms.c
        rows = {row.arm: row for row in connection.execute(sa.select(schema.arms).where(arms.experiment == name))}
        marked = [row for row in rows.values() if row.rolled_back_at is not None]
        barred = {key: row.arm for row in marked for key in (row.digest, row.weights_sha256) if key is not None}
        for arm, part in arm_configs.items():
            digest, weights, row = part["digest"], part.get("weights_sha256"), rows.get(arm)
            if row is not None and row.digest == digest:
                # The arm was registered before weights were.
                if row.weights_sha256 is None and weights is not None:
                    of_arm = sa.update(schema.arms).where(arms.experiment == name, arms.arm == arm)
                    connection.execute(of_arm.values(weights_sha256=weights))
                continue
            if row is not None and row.rolled_back_at is not None:
                raise MarlRayError(
                    f"experiment {name!r}: arm {arm!r} has been rolled back with bundle {row.digest[:DIGEST_DIGITS]}; "
                    "expected a new arm name for another bundle"
                )
            values: dict[str, Any] = {
                "digest": digest,
                "weights_sha256": weights,
                "rolled_back_at": None,
                "reason": None,
            }
            if (rolled_back_arm := barred.get(digest) or barred.get(weights)) is not None:
                values |= {"rolled_back_at": now, "reason": f"the weights of rolled-back arm {rolled_back_arm!r}"}
            insert = self._database.insert(schema.arms).values(experiment=name, arm=arm, **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["experiment", "arm"], set_=values))

    def change(
        self, name: str, action: Action, *, epoch: int | None, actor: str, reason: str, arm: str | None = None
    ) -> ExperimentRecord:
        """Do an action (see `lifecycle.transition`), write its audit entry, and return the changed experiment.

        `epoch` is the epoch that the action was decided on: if it is over, the method raises StaleEpochError and
        changes nothing. None means any epoch, for actions that only take traffic from treatments
        (`lifecycle.RETREATS`). A rollback concerns all treatments of the arm's weights. Rolling back again what is rolled
        back writes nothing. Raises MarlRayError if the experiment is unknown, if the action is not possible now, or if it
        might give traffic to a bundle that another experiment has rolled back.
        """
        if epoch is None and action not in RETREATS:
            raise MarlRayError(f"epoch: expected the epoch that {action} was decided on")
        with self._database.write_transaction() as connection:
            stored = read_experiment(connection, name, lock=True)
            if stored is None:
                raise MarlRayError(f"experiment: unknown experiment {name!r}")
            if epoch is not None and epoch != stored.epoch:
                raise StaleEpochError("epoch", f"{action} was decided on epoch {epoch}, {name!r} is at {stored.epoch}")
            now = time.time()
            twins = twin_treatments(connection, stored, arm) if action is Action.ROLLBACK else ()
            state = transition(stored.state, action, stored.plan, now, arm, twins)
            if state == stored.state:
                return stored
            record = ExperimentRecord(name, stored.config, stored.created, state, stored.plan)
            if action not in RETREATS:
                allowed_arms(connection, name, stored.config, stored.config["arms"], record.weights)
            marked = state.rolled_back - stored.state.rolled_back
            if marked:
                arms = schema.arms.c
                mark = sa.update(schema.arms).where(arms.experiment == name, arms.arm.in_(sorted(marked)))
                connection.execute(mark.values(rolled_back_at=now, reason=reason))
            concerned = {state.winner} if action is Action.PROMOTE else marked
            if arm is None and len(concerned) == 1:
                # The only treatment needs no name, and the entry has it all the same.
                arm = next(iter(concerned))
            self._write_action(connection, stored, record, action, actor, reason, now, arm)
            return record

    def reallocate(
        self, name: str, weights: Mapping[str, float], *, epoch: int, actor: str, reason: str
    ) -> ExperimentRecord:
        """Give a running `thompson` experiment other weights, as a new epoch with its audit entry.

        See `lifecycle.state_under_weights`. Raises StaleEpochError if the experiment is no longer at `epoch`, and
        MarlRayError if it is unknown, or if another experiment has rolled back an arm's bundle.
        """
        with self._database.write_transaction() as connection:
            stored = read_experiment(connection, name, lock=True)
            if stored is None:
                raise MarlRayError(f"experiment: unknown experiment {name!r}")
            if epoch != stored.epoch:
                raise StaleEpochError("epoch", f"weights were decided on epoch {epoch}, {name!r} is at {stored.epoch}")
            allowed_arms(connection, name, stored.config, stored.config["arms"])
            now = time.time()
            record = replace(stored, state=state_under_weights(stored.state, stored.plan, weights, now))
            update = sa.update(schema.experiments).where(schema.experiments.c.name == name)
            connection.execute(update.values(columns_of(record.state)))
            self._audit(
                connection, record, "reallocate", actor, reason, now, audited_state(stored), audited_state(record)
            )
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
        entry = {"experiment": record.name, "at": now, "actor": actor, "action": action, "arm": arm, "reason": reason}
        values = {**entry, "epoch": record.epoch, "before": before, "after": after}
        connection.execute(sa.insert(schema.audit).values(values))

    def audit(self, name: str) -> list[AuditEntry]:
        """Return every change of the experiment, the oldest first."""
        query = sa.select(schema.audit).where(schema.audit.c.experiment == name).order_by(schema.audit.c.id)
        with self._database.transaction() as connection:
            return [AuditEntry(*row) for row in connection.execute(query)]

    def read(self, name: str) -> ExperimentRecord | None:
        """Return the stored experiment; None if there is none of this name. Raises UnreadableExperimentError."""
        with self._database.transaction() as connection:
            return read_experiment(connection, name)

    def names(self) -> list[str]:
        """Return the names of all experiments, the oldest first."""
        experiments = schema.experiments.c
        with self._database.transaction() as connection:
            query = sa.select(experiments.name).order_by(experiments.created, experiments.name)
            return list(connection.execute(query).scalars())

    def states(self) -> dict[str, AssignmentState]:
        """Return experiment -> its assignment state, the oldest first, but those that this version cannot read.

        The log names these. Made for polling: while nothing changes it costs one row and returns the same object, which
        must not be changed. A config is read again only when it has changed.
        """
        with self._database.transaction() as connection:
            # Read first: what changes meanwhile is found by the next call.
            version = version_of(connection)
            if version != self._states[0]:
                self._states = version, read_states(connection, self._configs, self._log_once)
            return self._states[1]

    def _log_once(self, error: UnreadableExperimentError) -> None:
        if str(error) not in self._logged_errors:
            self._logged_errors.add(str(error))
            _log.error("%s", error)

    def assignment_state(self, name: str) -> AssignmentState:
        """Return the assignment state of one experiment. Raises MarlRayError if it is unknown or cannot be read."""
        record = self.read(name)
        if record is None:
            raise MarlRayError(f"experiment: unknown experiment {name!r}")
        return assignment_state(record)

    def epoch_history(self, name: str) -> EpochHistory | None:
        """Return the weights and populations of all epochs so far, read from the audit.

        None if the audit is incomplete or the salt has changed.
        """
        audit = schema.audit.c
        query = sa.select(audit.epoch, audit.after).where(audit.experiment == name).order_by(audit.id)
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
            record = read_experiment(connection, name)
        salts = {row.after["config"]["salt"] for row in rows if "config" in row.after}
        if record is None or not rows or rows[0].epoch > 1 or salts != {record.config["salt"]}:
            return None
        states = [row.after for row in rows]
        weights = [after.get("weights") or plan_of(after["config"]).weights for after in states]
        return EpochHistory(weights, frozenset(population_of(after["config"]) for after in states if "config" in after))

    def production(self, endpoint: str) -> Production | None:
        """Return the bundle that serves the endpoint's units that are in no experiment.

        The bundle is the winner of the newest experiment there if it has been promoted, else its control. None for an
        endpoint that has never had an experiment.
        """
        experiments = schema.experiments.c
        newest = sa.select(experiments.name).where(experiments.endpoint == endpoint)
        # Some of a layer's experiments may be over before others.
        open_first = sa.case((experiments.status.in_(OPEN_STATUSES), 0), else_=1)
        order = open_first, experiments.created.desc(), experiments.name.desc()
        with self._database.transaction() as connection:
            name = connection.execute(newest.order_by(*order).limit(1)).scalar()
            record = None if name is None else read_experiment(connection, name)
        if record is None:
            return None
        promoted = record.state.status is ExperimentStatus.PROMOTED
        arm = str(record.state.winner) if promoted else record.plan.control
        part = record.config["arms"][arm]
        bundle = part.get("bundle") or part.get("url") or part["digest"]
        return Production(record.name, arm, bundle, part["digest"])
