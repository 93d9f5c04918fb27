"""One experiment inside a replica: its assignment table, the sessions it remembers, and its arms."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment import Assignment, AssignmentTable, in_layer
from marl_ray.experiments.store import AssignmentState, ExperimentStore, Exposure, StoreError
from marl_ray.policies.bundle import Bundle
from marl_ray.serving.arms import ArmBatcher
from marl_ray.serving.exposures import ExposureLog

REMEMBERED = 100_000
"""Sessions per experiment that a replica remembers; a forgotten one costs one ignored insert, or one look-up."""

_log = logging.getLogger(__name__)


class Router:
    """Gives sessions their arm, for good, under the state that the store last told.

    In the first epoch the hash alone decides. Once weights have changed, the hash may disagree with what a session got
    before, so a session this replica does not remember is looked up in the store first.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        arms: dict[str, ArmBatcher],
        state: AssignmentState,
        log: ExposureLog,
        created: float,
    ):
        self.config, self.arms, self.created = config, arms, created
        self._log = log
        self._remembered: dict[str, Assignment] = {}
        self.follow(state)

    @property
    def control(self) -> str:
        """The first arm of the config."""
        return self.state.control

    def follow(self, state: AssignmentState) -> None:
        """Assign by another state from now on; it must name loaded arms only. One reference is swapped at a time, and a
        table made of an older state is still a right one for the request that read it."""
        if not state.weights.keys() <= self.arms.keys():
            raise ValueError(f"the table has arms {sorted(state.weights)}, loaded are {sorted(self.arms)}")
        self.table = AssignmentTable(state.weights, state.salt, state.epoch)
        self.state = state

    def takes_part(self, unit: str) -> bool:
        """Whether the unit is in the experiment's share of its layer; others are with the control and are not counted."""
        layer = self.state.layer
        return layer is None or in_layer(layer, self.state.layer_share, unit)

    def with_control(self) -> Assignment:
        """The control, by no draw."""
        return Assignment(self.control, self.state.epoch, 1.0)

    def recall(self, unit: str) -> Assignment | None:
        """The unit's arm if it is known without the database."""
        known = self._remembered.get(unit)
        if known is not None:
            return self._standing(known)
        return self.table.assign(unit) if self.table.epoch == 1 else None

    def look_up(self, unit: str) -> Assignment:
        """The unit's arm by the store or else by the table; blocks on the database, and does without it if it is away."""
        try:
            stored = self._log.store.assignment(self.config.name, unit)
        except StoreError as error:
            _log.error("%s: assigning without the store: %s", self.config.name, error)
            stored = None
        return self._standing(stored) if stored is not None else self.table.assign(unit)

    def _standing(self, assignment: Assignment) -> Assignment:
        """What the unit's assignment comes to: with `on_rollback: cut` a rolled-back arm's units go on with the control."""
        state = self.state
        return self.with_control() if state.cut and assignment.arm in state.rolled_back else assignment

    def expose(self, unit: str, assignment: Assignment) -> tuple[bool, Assignment]:
        """Note that the unit meets the arm. Returns whether that is new to this replica, and the unit's arm, which is
        the one it met before if another request was faster."""
        remembered = self._remembered.get(unit)
        if remembered is not None:
            return False, self._standing(remembered)
        if self._log.put(Exposure(self.config.name, unit, assignment, time.time())):
            if len(self._remembered) >= REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest
            self._remembered[unit] = assignment
        return True, assignment


@dataclass(frozen=True)
class LoadedExperiment:
    """A config and its arms' bundles."""

    config: ExperimentConfig
    bundles: dict[str, Bundle]

    def stored_config(self) -> dict[str, Any]:
        """What the store keeps: the config with the salt in force and each arm's digest."""
        data = self.config.model_dump(mode="json")
        data["salt"] = self.config.salt or self.config.name
        data["control"] = next(iter(self.config.arms))
        for arm, bundle in self.bundles.items():
            data["arms"][arm]["digest"] = bundle.digest
        return data

    def open(self, store: ExperimentStore, log: ExposureLog, max_batch: int, noise: np.random.Generator) -> Router:
        """Register with the store and make the router. Raises MarlRayError if the stored experiment forbids it."""
        record = store.open_experiment(self.config.name, self.stored_config())
        arms = {arm: ArmBatcher(bundle, max_batch, noise) for arm, bundle in self.bundles.items()}
        return Router(self.config, arms, store.table(self.config.name), log, record.created)
