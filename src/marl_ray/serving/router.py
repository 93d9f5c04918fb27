"""One experiment inside a replica: its assignment table, the sessions it remembers, and its arms."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment import Assignment, AssignmentTable, draw, in_layer
from marl_ray.experiments.states import Status
from marl_ray.experiments.store import AssignmentState, Exposure
from marl_ray.policies.bundle import Bundle
from marl_ray.serving.arms import Answer, AnyBundle, Observations, is_text
from marl_ray.serving.breaker import Breaker
from marl_ray.serving.exposures import ExposureLog
from marl_ray.serving.shadow import Shadows
from marl_ray.serving.texts import TextArm

REMEMBERED = 100_000
"""Sessions per experiment that a replica remembers; a forgotten one costs one ignored insert, or one look-up."""

OVERLAP_S = 2.0
"""How long two replicas may assign by different tables, with some room."""


class Arm(Protocol):
    """Actor-critics: in this process (`ArmBatcher`) or in a deployment of their own (`RemoteArm`)."""

    bundle: Bundle

    async def act(self, observations: Observations, greedy: bool, masks: Observations | None = None) -> Answer: ...


class Assigned(NamedTuple):
    """A unit's arm."""

    assignment: Assignment
    cluster: str | None = None
    """The cluster or block of time that was assigned with it, for its exposure."""
    sure: bool = True
    """The store knows of no other arm, as far as this replica can tell."""


@dataclass(slots=True)
class Session:
    """What a replica knows of one unit."""

    assignment: Assignment
    at: float
    """When it was first met here, monotonic seconds."""
    sure: bool
    """Else the store is asked again at its next act."""
    acts: int = 0
    seconds: float = 0.0
    """Time that its acts took here."""
    failed: bool = False
    """Its arm failed once at least."""


class Router:
    """Gives sessions their arm, for good, under the state that the store last told.

    In the first epoch the hash alone decides. Once weights have changed, the hash may disagree with what a session got
    before, so a session this replica does not remember is looked up in the store first. The same holds where blocks of
    time are assigned, because a session keeps the arm of the block that it began in.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        arms: Mapping[str, Arm | TextArm],
        state: AssignmentState,
        log: ExposureLog,
        created: float,
    ):
        self.config, self.arms, self.created = config, arms, created
        self.is_text = any(is_text(arm.bundle) for arm in arms.values())
        """Whether the arms are language models; arms of two kinds are in no experiment."""
        self.circuits = {arm: Breaker(config.breaker) for arm in arms}
        self.shadows = Shadows(config.shadow_concurrency)
        self._log = log
        self._remembered: dict[str, Session] = {}
        self.follow(state)

    @property
    def control(self) -> str:
        """The first arm of the config."""
        return self.state.control

    def close(self) -> None:
        """End the threads of its arms."""
        if self.is_text:
            for arm in self.arms.values():
                cast(TextArm, arm).close()

    @property
    def is_over(self) -> bool:
        return self.state.status in (Status.PROMOTED, Status.ROLLED_BACK, Status.STOPPED)

    def follow(self, state: AssignmentState) -> None:
        """Assign by another state from now on; it must name loaded arms only. One reference is swapped at a time, and a
        table made of an older state is still a right one for the request that read it."""
        if not state.weights.keys() <= self.arms.keys():
            raise ValueError(f"the table has arms {sorted(state.weights)}, loaded are {sorted(self.arms)}")
        self.table = AssignmentTable(state.weights, state.salt, state.epoch)
        self.state = state
        # Another replica may have met the same unit by the other table meanwhile, and have been the first to say so.
        just_now = time.monotonic() - OVERLAP_S
        for session in list(self._remembered.values()):
            if session.at > just_now:
                session.sure = False

    def takes_part(self, unit: str, cluster_id: str | None = None) -> bool:
        """Whether the unit is in the experiment's share of its layer, with its whole cluster where clusters are
        randomized; others are with the control and are not counted."""
        layer = self.state.layer
        key = cluster_id or unit if self.config.randomize == "cluster" else unit
        return layer is None or in_layer(layer, self.state.layer_share, key)

    def with_control(self) -> Assignment:
        """The control, by no draw."""
        return Assignment(self.control, self.state.epoch, 1.0)

    def session(self, unit: str) -> Session | None:
        """What is remembered of the unit."""
        return self._remembered.get(unit)

    def recall(self, unit: str, cluster_id: str | None) -> Assigned | None:
        """The unit's arm if it is known without the database."""
        known = self._remembered.get(unit)
        if known is not None:
            return Assigned(self._standing(known.assignment)) if known.sure else None
        if self.table.epoch > 1 or self.config.randomize == "switchback":
            return None
        return Assigned(*self._drawn(unit, cluster_id))

    def look_up(self, unit: str) -> Assignment | None:
        """The arm of the unit's exposure in the store; blocks on the database, and raises StoreError."""
        return self._log.store.assignment(self.config.name, unit)

    def settle(self, unit: str, cluster_id: str | None, stored: Assignment | None) -> Assigned:
        """The unit's arm when the store has been asked and knows this."""
        known = self._remembered.get(unit)
        if stored is not None:
            if known is not None:
                known.assignment, known.sure = stored, True
            return Assigned(self._standing(stored))
        if known is not None:  # its exposure is on its way to the store
            return self.guess(unit, cluster_id)
        return Assigned(*self._drawn(unit, cluster_id))

    def guess(self, unit: str, cluster_id: str | None) -> Assigned:
        """The unit's arm when the store cannot be asked."""
        known = self._remembered.get(unit)
        if known is not None:
            return Assigned(self._standing(known.assignment), sure=False)
        return Assigned(*self._drawn(unit, cluster_id), sure=False)

    def _drawn(self, unit: str, cluster_id: str | None) -> tuple[Assignment, str | None]:
        """By the table of now. A unit that names no cluster is a cluster of its own."""
        config = self.config
        return draw(
            self.table, config.randomize, unit, cluster=cluster_id or unit, at=time.time(), block_s=config.block_s
        )

    def _standing(self, assignment: Assignment) -> Assignment:
        """What the unit's assignment comes to: with `on_rollback: cut` a rolled-back arm's units go on with the control."""
        state = self.state
        return self.with_control() if state.cut and assignment.arm in state.rolled_back else assignment

    def expose(self, unit: str, assigned: Assigned) -> tuple[bool, Assignment]:
        """Note that the unit meets the arm. Returns whether that is new to this replica, and the unit's arm, which is
        the one it met before if another request was faster."""
        remembered = self._remembered.get(unit)
        if remembered is not None:
            return False, self._standing(remembered.assignment)
        assignment = assigned.assignment
        if self._log.put(Exposure(self.config.name, unit, assignment, time.time(), assigned.cluster)):
            if len(self._remembered) >= REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest
            self._remembered[unit] = Session(assignment, time.monotonic(), assigned.sure)
        return True, assignment


@dataclass(frozen=True)
class LoadedExperiment:
    """A config and its arms' bundles."""

    config: ExperimentConfig
    bundles: Mapping[str, AnyBundle]

    def stored_config(self) -> dict[str, Any]:
        """What the store keeps: the config with the salt in force, and the digests of each arm's bundle and weights."""
        data = self.config.model_dump(mode="json")
        data["salt"] = self.config.salt or self.config.name
        data["control"] = next(iter(self.config.arms))
        for arm, bundle in self.bundles.items():
            data["arms"][arm] |= {"digest": bundle.digest, "weights_sha256": bundle.manifest.weights_sha256}
        return data
