"""One experiment inside a replica: the table that assigns its units, and the arms that answer them."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment.population import Attributes, Population
from marl_ray.experiments.assignment.rendezvous import Assignment, AssignmentTable, PastTables, draw_arm, is_in_layer
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.lifecycle import FINAL_STATUSES, ExperimentStatus
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.records import AssignmentState, EpochHistory
from marl_ray.experiments.store.units import Exposure
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.serving.arms.protocol import AnyBundle, Arm, TextArm, is_text
from marl_ray.serving.errors import UnavailableError, WrongKindError
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.routing.breaker import Breaker
from marl_ray.serving.routing.remembered_units import RememberedUnits, Session
from marl_ray.serving.routing.shadow import Shadows

MAX_TABLES = 32
"""Maximum number of past weight tables that are asked for an arm; beyond that a lookup costs less."""


class UnitArm(NamedTuple):
    """A unit's arm, and how it was assigned."""

    assignment: Assignment
    cluster: str | None = None
    """The cluster of units or the block of time with which the unit was assigned; stored with its exposure."""
    sure: bool = True
    """True if no other replica can have assigned the unit to another arm."""


class _Tables(NamedTuple):
    """A state of the store, and what it means for the assignment of sessions."""

    state: AssignmentState
    now: AssignmentTable
    past: PastTables | None
    """All tables up to this one; None if they are unknown."""
    populations: frozenset[Population] | None
    """All populations up to this state's; None if they are unknown."""


class _HeldArms(NamedTuple):
    """The arms that are loaded here, and which of them answers for which arm."""

    arms: Mapping[str, Arm | TextArm]
    is_text: bool
    answering_arms: Mapping[str, Sequence[str]]
    """Arm of the config -> the loaded arms that may answer for its sessions, in order of preference."""


class Router:
    """Assigns every session to one arm and never changes it, under the state that the store last reported.

    In the first epoch the hash alone decides. After a change of weights the hash may differ from the arm that a session
    already has, so a session that this replica does not remember is looked up in the store first. The same holds where
    clusters or blocks of time are assigned, because a session keeps the arm of the cluster or block in which it began.

    Sessions and requests belong to one event loop. `hold` and `follow` may be called from any thread: each swaps one
    value that never changes, so a request sees the arms and tables of before or of after.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        arms: Mapping[str, Arm | TextArm],
        state: AssignmentState,
        store: ExperimentStore,
        log: ExposureLog,
        created: float,
    ):
        """`arms` are those of the config's arms that are loaded here."""
        self.config, self.created = config, created
        self.circuits = {arm: Breaker(config.breaker) for arm in config.arms}
        self.shadows = Shadows(config.shadow_concurrency)
        self._store, self._log = store, log
        self.remembered = RememberedUnits()
        self.digests: dict[str, str] = {}
        """Arm -> digest of its bundle, also of an arm that was dropped while requests to it were under way."""
        self._swapping = threading.Lock()
        self._tables = self._read_tables(state)
        self._held = _HeldArms({}, False, {})
        self.hold(arms)

    def hold(self, arms: Mapping[str, Arm | TextArm]) -> None:
        """Answer with these arms from now on."""
        with self._swapping:
            self.digests |= {name: arm.bundle.digest for name, arm in arms.items()}
            self._held = self._hold_arms(arms)

    def _hold_arms(self, arms: Mapping[str, Arm | TextArm]) -> _HeldArms:
        orders = {arm: dict.fromkeys((arm, self.production, self.control)) for arm in self.config.arms}
        answering_arms = {arm: [name for name in order if name in arms] for arm, order in orders.items()}
        return _HeldArms(arms, any(is_text(arm.bundle) for arm in arms.values()), answering_arms)

    @property
    def state(self) -> AssignmentState:
        """The state that the store last reported."""
        return self._tables.state

    @property
    def table(self) -> AssignmentTable:
        """The table that new sessions are assigned by."""
        return self._tables.now

    @property
    def arms(self) -> Mapping[str, Arm | TextArm]:
        """The arms that are loaded here, a mapping that never changes."""
        return self._held.arms

    @property
    def is_text(self) -> bool:
        """True if the arms are language models; no experiment has arms of two kinds."""
        return self._held.is_text

    @property
    def control(self) -> str:
        """The first arm of the config."""
        return self.state.control

    @property
    def production(self) -> str:
        """The arm that answers units outside of the experiment: the promoted winner, else the control."""
        state = self.state
        if state.status is not ExperimentStatus.PROMOTED:
            return state.control
        return next((arm for arm, weight in state.weights.items() if weight > 0), state.control)

    def answering_arms(self, arm: str) -> Sequence[str]:
        """Return the loaded arms that may answer for a session of this arm, in order of preference."""
        return self._held.answering_arms[arm]

    def first_answering_arm(self, arm: str) -> str:
        """Return the first of `answering_arms`. Raises UnavailableError if there is none."""
        return self._first_answering(self._held, arm)

    def _first_answering(self, held: _HeldArms, arm: str) -> str:
        for name in held.answering_arms[arm]:
            return name
        raise UnavailableError(f"no arm of experiment {self.config.name!r} is loaded here")

    def actor(self, name: str) -> Arm:
        """Return the loaded arm of this name, which acts.

        Raises WrongKindError if it writes text, and UnavailableError if it was dropped since the request was assigned.
        """
        arm = self._loaded_arm(name)
        if is_text(arm.bundle):
            raise self._wrong_kind_error("token", "actor_critic", "experiment")
        return arm

    def writer(self, name: str) -> TextArm:
        """Return the loaded arm of this name, which writes text. Raises as `actor` does, if it acts."""
        arm = self._loaded_arm(name)
        if not is_text(arm.bundle):
            raise self._wrong_kind_error("actor_critic", "token", "experiment")
        return arm

    def _loaded_arm(self, name: str) -> Arm | TextArm:
        arm = self._held.arms.get(name)
        if arm is None:
            message = f"arm {name!r} of experiment {self.config.name!r} is not loaded here any more"
            raise UnavailableError(message)
        return arm

    def _wrong_kind_error(self, kind: str, expected: str, field: str) -> WrongKindError:
        message = f"{self.config.served_as!r} serves {kind} policies, expected {expected} policies"
        return WrongKindError(message, field)

    def bundle_of(self, arm: str) -> AnyBundle:
        """Return the bundle of the first arm that may answer for this arm.

        Raises UnavailableError if none is loaded.
        """
        held = self._held
        return held.arms[self._first_answering(held, arm)].bundle

    def actor_bundle_of(self, arm: str, field: str = "experiment") -> ActorCriticBundle:
        """Return the bundle of `bundle_of`, which must hold actor-critics.

        Raises WrongKindError naming the field if it holds language models, and as `bundle_of` does.
        """
        bundle = self.bundle_of(arm)
        if is_text(bundle):
            raise self._wrong_kind_error("token", "actor_critic", field)
        return bundle

    def close(self) -> None:
        """Release what the arms hold in this process."""
        for arm in self.arms.values():
            arm.close()

    @property
    def is_over(self) -> bool:
        """True if the experiment has ended: it is promoted, rolled back or stopped."""
        return self.state.status in FINAL_STATUSES

    def unknown_arms(self, state: AssignmentState) -> frozenset[str]:
        """Return the arms by which a state assigns, its control among them, that this gateway's config lacks.

        Another gateway at the same database, whose config is newer, may have added them.
        """
        assigning = {state.control, *(arm for arm, weight in state.weights.items() if weight > 0)}
        return frozenset(assigning - self.config.arms.keys())

    def followable_state(self, state: AssignmentState) -> AssignmentState:
        """Return the state itself, or what this replica can follow of one that has `unknown_arms`.

        That is the present state without the arms that the new one has rolled back; as in `lifecycle.weights_of` the
        control inherits their weight.
        """
        present = self.state
        if not self.unknown_arms(state):
            return state
        barred = (state.rolled_back - present.rolled_back) & self.config.arms.keys() - {present.control}
        if not barred:
            return present
        weights = {arm: 0.0 if arm in barred else weight for arm, weight in present.weights.items()}
        weights[present.control] += math.fsum(present.weights.get(arm, 0.0) for arm in barred)
        return replace(
            present,
            epoch=state.epoch,
            weights=weights,
            shadows=tuple(arm for arm in present.shadows if arm not in barred),
            rolled_back=present.rolled_back | barred,
        )

    def follow(self, state: AssignmentState, reported_at: float | None = None) -> None:
        """Assign by another state from now on. Raises ValueError if it has `unknown_arms`.

        A request that has read the older table still assigns correctly by it. `reported_at` is the moment at which the
        store last reported the previous state (monotonic seconds; now if not given).
        """
        tables = self._read_tables(state)  # before the lock, because it may read the store
        with self._swapping:
            self._tables = tables
            self._held = self._hold_arms(self._held.arms)
        # Meanwhile another replica may have exposed the same unit by the other table, and been the first to store it.
        self.remembered.doubt_since(time.monotonic() if reported_at is None else reported_at)

    def _read_tables(self, state: AssignmentState) -> _Tables:
        if unknown := self.unknown_arms(state):
            raise ValueError(f"the state assigns {sorted(unknown)}, configured are {sorted(self.config.arms)}")
        past: EpochHistory | None = EpochHistory([], frozenset())
        if state.epoch > 1:
            try:
                past = self._store.epoch_history(self.config.name)
            except StoreError:
                past = None
        # If the population now includes every unit, no past population needs a lookup.
        everyone = frozenset({state.population}) if state.population.is_everyone else None
        now = AssignmentTable(state.weights, state.salt, state.epoch)
        if past is None:
            return _Tables(state, now, None, everyone)
        tables = PastTables([*past.weights, state.weights], state.salt)
        return _Tables(state, now, tables, everyone or past.populations | {state.population})

    def draw_key(self, unit: str, cluster_id: str | None) -> str:
        """Return the name whose hash decides for the unit: its own, or its cluster's.

        The cluster's decides if clusters are randomized. A unit that names no cluster is its own cluster.
        """
        return cluster_id or unit if self.config.randomize == "cluster" else unit

    def is_in_share(self, unit: str, cluster_id: str | None = None) -> bool:
        """Return True if the unit is in the experiment's share of its layer.

        If clusters are randomized, its cluster must be. Other units get the production arm and do not count.
        """
        state = self.state
        return state.layer is None or is_in_layer(state.layer, state.layer_share, self.draw_key(unit, cluster_id))

    @property
    def has_places_by_cluster(self) -> bool:
        """True if a unit's place in the experiment's layer depends on the cluster that it names."""
        return self.state.layer is not None and self.config.randomize == "cluster"

    def includes(self, unit: str, cluster_id: str | None, attributes: Attributes) -> bool:
        """Return True if the experiment's population includes the unit now, whether or not it has met an arm before."""
        state = self.state
        return state.population.is_everyone or state.population.includes(
            state.salt, self.draw_key(unit, cluster_id), attributes
        )

    def may_have_included(self, unit: str, cluster_id: str | None) -> bool:
        """Return True if the population may have included the unit, now or in an earlier epoch.

        The unit may have had other attributes then, or been in another cluster.
        """
        state, _, _, populations = self._tables
        if populations is None or self.config.randomize == "cluster":
            return True
        key = self.draw_key(unit, cluster_id)
        return any(population.may_include(state.salt, key) for population in populations)

    def with_production(self) -> Assignment:
        """Return the assignment of units outside of the experiment, to the production arm without a draw."""
        return Assignment(self.production, self.state.epoch, 1.0)

    def with_control(self) -> Assignment:
        """Return an assignment to the control without a draw."""
        return Assignment(self.control, self.state.epoch, 1.0)

    def session(self, unit: str) -> Session | None:
        """Return the unit as this replica remembers it, or None."""
        return self.remembered.sessions.get(unit)

    def known_arm(self, unit: str, cluster_id: str | None) -> UnitArm | None:
        """Return the unit's arm, or None if only the database can tell it."""
        session = self.session(unit)
        if session is not None:
            return UnitArm(self._present_assignment(session.assignment)) if session.sure else None
        tables = self._tables
        past, randomize = tables.past, self.config.randomize
        # With clusters and blocks the session may have begun in another one.
        if randomize != "session" or past is None or len(past) > MAX_TABLES or not past.agree(unit):
            return None
        return UnitArm(*self._draw(tables.now, unit, cluster_id))

    def stored_arm(self, unit: str, cluster_id: str | None, stored: Assignment | None) -> UnitArm:
        """Return the unit's arm, given the store's answer."""
        session = self.session(unit)
        if stored is not None:
            if session is not None:
                session.assignment, session.sure = stored, True
            return UnitArm(self._present_assignment(stored))
        if session is not None:  # the replica's own exposure is still on its way to the store
            return self.provisional_arm(unit, cluster_id)
        return UnitArm(*self._draw(self.table, unit, cluster_id))

    def provisional_arm(self, unit: str, cluster_id: str | None) -> UnitArm:
        """Return the unit's arm while the store cannot be asked."""
        session = self.session(unit)
        if session is not None:
            return UnitArm(self._present_assignment(session.assignment), sure=False)
        return UnitArm(*self._draw(self.table, unit, cluster_id), sure=False)

    def _draw(self, table: AssignmentTable, unit: str, cluster_id: str | None) -> tuple[Assignment, str | None]:
        """Draw by a table. A unit that names no cluster is its own cluster."""
        config = self.config
        return draw_arm(
            table, config.randomize, unit, cluster=cluster_id or unit, at=time.time(), block_s=config.block_s
        )

    def _present_assignment(self, assignment: Assignment) -> Assignment:
        """Return the unit's present assignment.

        With `on_rollback: cut`, units of a rolled-back arm continue with the control. So do those that another gateway
        has assigned to an arm that this one's config lacks.
        """
        state, arm = self.state, assignment.arm
        ends_here = (state.on_rollback == "cut" and arm in state.rolled_back) or arm not in self.config.arms
        return self.with_control() if ends_here else assignment

    def expose(self, unit: str, unit_arm: UnitArm) -> tuple[bool, Assignment]:
        """Note that the unit meets the arm.

        Returns whether that is new to this replica, and the unit's arm; if a concurrent request was faster, that is the
        arm which the other request noted.
        """
        session = self.session(unit)
        if session is not None:
            return False, self._present_assignment(session.assignment)
        assignment = unit_arm.assignment
        if self._log.put(Exposure(self.config.name, unit, assignment, time.time(), unit_arm.cluster)):
            self.remembered.add(unit, Session(assignment, time.monotonic(), unit_arm.sure))
        return True, assignment
