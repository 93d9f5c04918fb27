"""The router of one experiment inside a replica: it assigns units, remembers them, and notes what they meet."""

import threading
import time
from collections.abc import Mapping

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment.rendezvous import Assignment
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.records import AssignmentState, EpochHistory
from marl_ray.experiments.store.units import Exposure
from marl_ray.serving.arms.protocol import Arm, TextArm
from marl_ray.serving.logs.exposures import ExposureLog
from marl_ray.serving.routing.breaker import Breaker
from marl_ray.serving.routing.experiment.assignment_rules import AssignmentRules, UnitArm
from marl_ray.serving.routing.experiment.followable_states import unknown_arms
from marl_ray.serving.routing.experiment.loaded_arms import LoadedArms
from marl_ray.serving.routing.experiment.remembered_units import RememberedUnit, RememberedUnits
from marl_ray.serving.routing.shadow import Shadows


class Router:
    """Assigns every unit to one arm and never changes it, under the state that the store last reported.

    In the first epoch the hash alone decides. After a change of weights the hash may differ from the arm that a unit
    already has, so a unit that this replica does not remember is looked up in the store first. The same holds where
    clusters or blocks of time are assigned, because a unit keeps the arm of the cluster or block in which it began.

    Units and requests belong to one event loop. `replace_arms` and `follow` may be called from any thread: each swaps
    values that never change, so a request sees the arms and rules of before or of after.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        arms: Mapping[str, Arm | TextArm],
        state: AssignmentState,
        store: ExperimentStore,
        log: ExposureLog,
    ):
        """`arms` are those of the config's arms that are loaded here."""
        self.config = config
        self.created = state.created
        self.circuits = {arm: Breaker(config.breaker) for arm in config.arms}
        self.shadows = Shadows(config.shadow_concurrency)
        self._store = store
        self._log = log
        self.remembered = RememberedUnits()
        self._swapping = threading.Lock()
        self.rules = self._rules_of(state)
        """The state that the store last reported, and how it assigns; `follow` replaces them."""
        self.arms = LoadedArms(config, arms, state)
        """The arms that are loaded here; `replace_arms` and `follow` replace them. A request reads them once."""

    def replace_arms(self, arms: Mapping[str, Arm | TextArm]) -> None:
        """Answer with these arms from now on."""
        with self._swapping:
            self.arms = LoadedArms(self.config, arms, self.rules.state)

    def follow(self, state: AssignmentState, reported_at: float | None = None) -> None:
        """Assign by another state from now on. Raises ValueError if it has `unknown_arms`.

        `reported_at` is the moment at which the store last reported the previous state (monotonic seconds; now if not
        given).
        """
        rules = self._rules_of(state)  # before the lock, because it may read the store
        with self._swapping:
            self.rules = rules
            self.arms = self.arms.in_state(state)
        # Meanwhile another replica may have exposed the same unit by the other table, and been the first to store it.
        self.remembered.doubt_since(time.monotonic() if reported_at is None else reported_at)

    def _rules_of(self, state: AssignmentState) -> AssignmentRules:
        """Return the rules of a state, for which the store is asked for the epochs before."""
        if unknown := unknown_arms(self.config.arms.keys(), state):
            raise ValueError(f"the state assigns {sorted(unknown)}, configured are {sorted(self.config.arms)}")
        history: EpochHistory | None = EpochHistory([], frozenset())
        if state.epoch > 1:
            try:
                history = self._store.epoch_history(self.config.name)
            except StoreError:
                history = None
        return AssignmentRules(self.config, state, history)

    @property
    def is_ready(self) -> bool:
        """True if every arm that gets traffic is answered for."""
        arms = self.arms
        return all(arms.answering_arms(arm) for arm, weight in arms.state.weights.items() if weight > 0)

    def known_arm(self, unit: str, cluster_id: str | None) -> UnitArm | None:
        """Return the unit's arm, or None if only the database can tell it."""
        remembered = self.remembered.units.get(unit)
        rules = self.rules
        if remembered is not None:
            return UnitArm(rules.present_assignment(remembered.assignment)) if remembered.sure else None
        return rules.draw(unit, cluster_id) if rules.has_same_arm_in_all_epochs(unit) else None

    def stored_arm(self, unit: str, cluster_id: str | None, stored: Assignment | None) -> UnitArm:
        """Return the unit's arm, given the store's answer."""
        remembered = self.remembered.units.get(unit)
        if stored is not None:
            if remembered is not None:
                remembered.assignment = stored
                remembered.sure = True
            return UnitArm(self.rules.present_assignment(stored))
        if remembered is not None:  # the replica's own exposure is still on its way to the store
            return self.provisional_arm(unit, cluster_id)
        return self.rules.draw(unit, cluster_id)

    def provisional_arm(self, unit: str, cluster_id: str | None) -> UnitArm:
        """Return the unit's arm while the store cannot be asked."""
        remembered = self.remembered.units.get(unit)
        if remembered is not None:
            return UnitArm(self.rules.present_assignment(remembered.assignment), sure=False)
        return self.rules.draw(unit, cluster_id, sure=False)

    def expose(self, unit: str, unit_arm: UnitArm) -> tuple[bool, Assignment]:
        """Note that the unit meets the arm.

        Returns whether that is new to this replica, and the unit's arm; if a concurrent request was faster, that is the
        arm which the other request noted.
        """
        remembered = self.remembered.units.get(unit)
        if remembered is not None:
            return False, self.rules.present_assignment(remembered.assignment)
        assignment = unit_arm.assignment
        if self._log.put(Exposure(self.config.name, unit, assignment, time.time(), unit_arm.cluster)):
            self.remembered.add(unit, RememberedUnit(assignment, time.monotonic(), unit_arm.sure))
        return True, assignment
