"""One experiment inside a replica: its assignment table, the sessions it remembers, and its arms."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment.population import Attributes, Population
from marl_ray.experiments.assignment.rendezvous import Assignment, AssignmentTable, PastTables, draw, in_layer
from marl_ray.experiments.lifecycle import ExperimentStatus
from marl_ray.experiments.store.experiment_store import AssignmentState, Exposure, StoreError
from marl_ray.experiments.store.records import Past
from marl_ray.serving.arms.protocol import AnyBundle, Arm, TextArm, is_text
from marl_ray.serving.http.protocol import RequestError
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.routing.breaker import Breaker
from marl_ray.serving.routing.shadow import Shadows

REMEMBERED = 100_000
"""Sessions per experiment that a replica remembers; a forgotten one costs one ignored insert, or one look-up."""

MOST_TABLES = 32
"""Beyond so many different weights a look-up costs less than asking each of them."""

OVERLAP_S = 2.0
"""Seconds in which two replicas may assign by different tables, with some room."""


class UnitArm(NamedTuple):
    """A unit's arm."""

    assignment: Assignment
    cluster: str | None = None
    """The cluster of units or the block of time that was assigned with it, for its exposure."""
    sure: bool = True
    """True if no other replica can have assigned the unit to another arm."""


@dataclass(slots=True)
class Session:
    """One unit, as a replica remembers it."""

    assignment: Assignment
    at: float
    """Moment of its first exposure by this replica, monotonic seconds."""
    sure: bool
    """False if the store is to be asked again at the session's next act."""
    acts: int = 0
    seconds: float = 0.0
    """Time that its acts took here."""
    failed: bool = False
    """Its arm failed once at least."""


class Router:
    """Gives sessions their arm, for good, under the state that the store last told.

    In the first epoch the hash alone decides. Once weights have changed, the hash may disagree with what a session got
    before, so a session this replica does not remember is looked up in the store first. The same holds where clusters or
    blocks of time are assigned, because a session keeps the arm of the cluster or block that it began in.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        arms: Mapping[str, Arm | TextArm],
        state: AssignmentState,
        log: ExposureLog,
        created: float,
    ):
        """`arms` are those that are loaded here, of the config's."""
        self.config, self.created, self.state = config, created, state
        self.hold(arms)
        self.circuits = {arm: Breaker(config.breaker) for arm in config.arms}
        self.shadows = Shadows(config.shadow_concurrency)
        self._log = log
        self._remembered: dict[str, Session] = {}
        self._absent: dict[str, float] = {}
        """Unit -> until when it is not asked for again, monotonic seconds."""
        self.follow(state)

    def hold(self, arms: Mapping[str, Arm | TextArm]) -> None:
        """Answer with these arms from now on. Replaced, never changed: requests meanwhile see the old or the new ones."""
        self.arms = arms
        self.is_text = any(is_text(arm.bundle) for arm in arms.values())
        """True if the arms are language models; no experiment has arms of two kinds."""
        self._note_answering()

    @property
    def control(self) -> str:
        """The first arm of the config."""
        return self.state.control

    @property
    def production(self) -> str:
        """The arm that answers where no other may: the winner once it is promoted, else the control."""
        state = self.state
        if state.status is not ExperimentStatus.PROMOTED:
            return state.control
        return next((arm for arm, weight in state.weights.items() if weight > 0), state.control)

    def answering(self, arm: str) -> Sequence[str]:
        """The arms that may answer for a session of this arm, in turn, of those that are loaded here."""
        return self._answering[arm]

    def _note_answering(self) -> None:
        turns = {arm: dict.fromkeys((arm, self.production, self.control)) for arm in self.config.arms}
        self._answering = {arm: [name for name in turn if name in self.arms] for arm, turn in turns.items()}

    def bundle_of(self, arm: str) -> AnyBundle:
        """The bundle of whoever answers for the arm first; RequestError 503 if nobody does."""
        for name in self.answering(arm):
            return self.arms[name].bundle
        raise RequestError(503, None, f"no arm of experiment {self.config.name!r} is loaded here", 1.0)

    def close(self) -> None:
        """End the threads of its arms."""
        if self.is_text:
            for arm in self.arms.values():
                cast(TextArm, arm).close()

    @property
    def is_over(self) -> bool:
        return self.state.status in (ExperimentStatus.PROMOTED, ExperimentStatus.ROLLED_BACK, ExperimentStatus.STOPPED)

    def follow(self, state: AssignmentState, told_at: float | None = None) -> None:
        """Assign by another state from now on; it must name arms of the config only. One reference is swapped at a time,
        and a table made of an older state is still a right one for the request that read it. `told_at` is when the store
        last told that the state before was in force (monotonic seconds; now, when not given)."""
        if not state.weights.keys() <= self.config.arms.keys():
            raise ValueError(f"the table has arms {sorted(state.weights)}, configured are {sorted(self.config.arms)}")
        self._past, self._populations = self._read_past(state)
        self.table = AssignmentTable(state.weights, state.salt, state.epoch)
        self.state = state
        self._note_answering()
        # Another replica may have met the same unit by the other table meanwhile, and have been the first to say so.
        since = (time.monotonic() if told_at is None else told_at) - OVERLAP_S
        for session in list(self._remembered.values()):
            if session.at > since:
                session.sure = False

    def _read_past(self, state: AssignmentState) -> tuple[PastTables | None, frozenset[Population] | None]:
        """All tables and populations up to this state's; None where they are unknown."""
        past: Past | None = Past([], frozenset())
        if state.epoch > 1:
            try:
                past = self._log.store.past(self.config.name)
            except StoreError:
                past = None
        # Everyone is in it now, so nobody is asked for.
        known = frozenset({state.population}) if state.population.is_everyone else None
        if past is None:
            return None, known
        return PastTables([*past.weights, state.weights], state.salt), known or past.populations | {state.population}

    def drawn_by(self, unit: str, cluster_id: str | None) -> str:
        """The name whose hash decides for the unit: its own or, where clusters are randomized, its cluster's. A unit that
        names no cluster is a cluster of its own."""
        return cluster_id or unit if self.config.randomize == "cluster" else unit

    def takes_part(self, unit: str, cluster_id: str | None = None) -> bool:
        """True if the unit is in the experiment's share of its layer, with its whole cluster where clusters are
        randomized; others are with production and are not counted."""
        layer = self.state.layer
        return layer is None or in_layer(layer, self.state.layer_share, self.drawn_by(unit, cluster_id))

    @property
    def has_places_by_cluster(self) -> bool:
        """True if a unit that comes in another cluster would have another place in the experiment's layer."""
        return self.state.layer is not None and self.config.randomize == "cluster"

    def includes(self, unit: str, cluster_id: str | None, attributes: Attributes) -> bool:
        """True if the experiment's population has the unit now; it may have met an arm before."""
        population = self.state.population
        return population.is_everyone or population.includes(
            self.state.salt, self.drawn_by(unit, cluster_id), attributes
        )

    def may_have_included(self, unit: str, cluster_id: str | None) -> bool:
        """True if the unit can have been in the population, now or in an earlier epoch, with some attributes; or in
        another cluster."""
        if self._populations is None or self.config.randomize == "cluster":
            return True
        key = self.drawn_by(unit, cluster_id)
        return any(population.may_include(self.state.salt, key) for population in self._populations)

    def is_absent(self, unit: str) -> bool:
        """True if the store has lately known no exposure of the unit."""
        return self._absent.get(unit, 0.0) > time.monotonic()

    def note_absent(self, unit: str) -> None:
        """The store knows no exposure of the unit: do not ask again for as long as replicas may differ anyway."""
        self._absent.pop(unit, None)
        if len(self._absent) >= REMEMBERED:
            del self._absent[next(iter(self._absent))]  # the oldest
        self._absent[unit] = time.monotonic() + OVERLAP_S

    def with_production(self) -> Assignment:
        """The arm that answers units outside of the experiment, by no draw."""
        return Assignment(self.production, self.state.epoch, 1.0)

    def with_control(self) -> Assignment:
        """The control, by no draw."""
        return Assignment(self.control, self.state.epoch, 1.0)

    def session(self, unit: str) -> Session | None:
        """The unit as this replica remembers it, or None."""
        return self._remembered.get(unit)

    def recall(self, unit: str, cluster_id: str | None) -> UnitArm | None:
        """The unit's arm if it is known without the database."""
        known = self._remembered.get(unit)
        if known is not None:
            return UnitArm(self._standing(known.assignment)) if known.sure else None
        past, randomize = self._past, self.config.randomize
        # With clusters and blocks the session may have come by another one before.
        if randomize != "session" or past is None or len(past) > MOST_TABLES or not past.agree(unit):
            return None
        return UnitArm(*self._drawn(unit, cluster_id))

    def settle(self, unit: str, cluster_id: str | None, stored: Assignment | None) -> UnitArm:
        """The unit's arm when the store has been asked and knows this."""
        known = self._remembered.get(unit)
        if stored is not None:
            if known is not None:
                known.assignment, known.sure = stored, True
            return UnitArm(self._standing(stored))
        if known is not None:  # its exposure is on its way to the store
            return self.guess(unit, cluster_id)
        return UnitArm(*self._drawn(unit, cluster_id))

    def guess(self, unit: str, cluster_id: str | None) -> UnitArm:
        """The unit's arm when the store cannot be asked."""
        known = self._remembered.get(unit)
        if known is not None:
            return UnitArm(self._standing(known.assignment), sure=False)
        return UnitArm(*self._drawn(unit, cluster_id), sure=False)

    def _drawn(self, unit: str, cluster_id: str | None) -> tuple[Assignment, str | None]:
        """Draw by the table of now. A unit that names no cluster is a cluster of its own."""
        config = self.config
        return draw(
            self.table, config.randomize, unit, cluster=cluster_id or unit, at=time.time(), block_s=config.block_s
        )

    def _standing(self, assignment: Assignment) -> Assignment:
        """The unit's assignment now: with `on_rollback: cut`, a rolled-back arm's units go on with the control."""
        state = self.state
        return self.with_control() if state.cut and assignment.arm in state.rolled_back else assignment

    def expose(self, unit: str, unit_arm: UnitArm) -> tuple[bool, Assignment]:
        """Note that the unit meets the arm. Returns whether that is new to this replica, and the unit's arm, which is
        the one it met before if another request was faster."""
        remembered = self._remembered.get(unit)
        if remembered is not None:
            return False, self._standing(remembered.assignment)
        assignment = unit_arm.assignment
        if self._log.put(Exposure(self.config.name, unit, assignment, time.time(), unit_arm.cluster)):
            if len(self._remembered) >= REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest
            self._remembered[unit] = Session(assignment, time.monotonic(), unit_arm.sure)
        return True, assignment
