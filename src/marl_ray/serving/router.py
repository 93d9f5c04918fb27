"""One experiment inside a replica: its assignment table, the sessions it remembers, and its arms."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment import Assignment, AssignmentTable
from marl_ray.experiments.store import ExperimentRecord, ExperimentStore, Exposure
from marl_ray.policies.bundle import Bundle
from marl_ray.serving.arms import ArmBatcher
from marl_ray.serving.exposures import ExposureLog

REMEMBERED = 100_000
"""Sessions per experiment that a replica remembers; a forgotten one costs one ignored insert, or one look-up."""


class Router:
    """Gives sessions their arm, for good.

    In the first epoch the hash alone decides. Once weights have changed, the hash may disagree with what a session got
    before, so a session this replica does not remember is looked up in the store first.
    """

    def __init__(
        self, config: ExperimentConfig, arms: dict[str, ArmBatcher], record: ExperimentRecord, log: ExposureLog
    ):
        self.config = config
        self.arms = arms
        self.record = record
        self.table = compile_table(config, record.epoch)
        self._log = log
        self._remembered: dict[str, Assignment] = {}

    @property
    def control(self) -> str:
        """The first arm of the config."""
        return next(iter(self.config.arms))

    def swap(self, table: AssignmentTable) -> None:
        """Assign new sessions by another table from now on; it must name loaded arms only."""
        if not table.weights.keys() <= self.arms.keys():
            raise ValueError(f"the table has arms {sorted(table.weights)}, loaded are {sorted(self.arms)}")
        self.table = table

    def recall(self, unit: str) -> Assignment | None:
        """The unit's arm if it is known without the database."""
        return self._remembered.get(unit) or (self.table.assign(unit) if self.table.epoch == 1 else None)

    def look_up(self, unit: str) -> Assignment:
        """The unit's arm by the store or else by the table; blocks on the database."""
        return self._log.store.assignment(self.config.name, unit) or self.table.assign(unit)

    def expose(self, unit: str, assignment: Assignment) -> tuple[bool, Assignment]:
        """Note that the unit meets the arm. Returns whether that is new to this replica, and the unit's arm, which is
        the one it met before if another request was faster."""
        remembered = self._remembered.get(unit)
        if remembered is not None:
            return False, remembered
        if self._log.put(Exposure(self.config.name, unit, assignment, time.time())):
            if len(self._remembered) >= REMEMBERED:
                del self._remembered[next(iter(self._remembered))]  # the oldest
            self._remembered[unit] = assignment
        return True, assignment


def compile_table(config: ExperimentConfig, epoch: int) -> AssignmentTable:
    """The assignment table of a config."""
    weights = {arm: part.weight for arm, part in config.arms.items()}
    return AssignmentTable(weights, config.salt or config.name, epoch)


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
        return Router(self.config, arms, record, log)
