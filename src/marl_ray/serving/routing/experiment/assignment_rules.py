"""The rules by which an experiment assigns units in one state of the store: who takes part, and with which arm."""

import time
from typing import NamedTuple

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.assignment.population import Attributes
from marl_ray.experiments.assignment.rendezvous import Assignment, AssignmentTable, PastTables, draw_arm, is_in_layer
from marl_ray.experiments.store.records import AssignmentState, EpochHistory

MAX_TABLES = 32
"""Maximum number of past weight tables that are asked for an arm; beyond that a lookup costs less."""


class UnitArm(NamedTuple):
    """A unit's arm, and how it was assigned."""

    assignment: Assignment
    cluster: str | None = None
    """The cluster of units or the block of time with which the unit was assigned; stored with its exposure."""
    sure: bool = True
    """True if no other replica can have assigned the unit to another arm."""


class AssignmentRules:
    """A state of the store, and what it means for the assignment of units. Never changed: another state is another value.

    A request that has read the rules of an older state still assigns correctly by them.
    """

    __slots__ = ("_config", "_past", "_populations", "control_assignment", "production_assignment", "state", "table")

    def __init__(self, config: ExperimentConfig, state: AssignmentState, history: EpochHistory | None):
        """`history` is of the epochs before the state's, and may include that one; None if it is unknown."""
        self._config = config
        self.state = state
        self.table = AssignmentTable(state.weights, state.salt, state.epoch)
        """The table that new units are assigned by."""
        self.production_assignment = Assignment(state.production, state.epoch, 1.0)
        """The assignment of units outside of the experiment, to the production arm without a draw."""
        self.control_assignment = Assignment(state.control, state.epoch, 1.0)
        """An assignment to the control without a draw."""
        self._past = None if history is None else PastTables([*history.weights, state.weights], state.salt)
        """All tables up to this state's; None if they are unknown."""
        # If the population now includes every unit, no past population needs a lookup.
        everyone = frozenset({state.population}) if state.population.is_everyone else None
        self._populations = everyone or (None if history is None else history.populations | {state.population})
        """All populations up to this state's; None if they are unknown."""

    def draw_key(self, unit: str, cluster_id: str | None) -> str:
        """Return the name whose hash decides for the unit: its own, or its cluster's.

        The cluster's decides if clusters are randomized. A unit that names no cluster is its own cluster.
        """
        return cluster_id or unit if self._config.randomize == "cluster" else unit

    def is_in_share(self, unit: str, cluster_id: str | None = None) -> bool:
        """Return True if the unit is in the experiment's share of its layer.

        If clusters are randomized, its cluster must be. Other units get the production arm and do not count.
        """
        state = self.state
        return state.layer is None or is_in_layer(state.layer, state.layer_share, self.draw_key(unit, cluster_id))

    @property
    def has_places_by_cluster(self) -> bool:
        """True if a unit's place in the experiment's layer depends on the cluster that it names."""
        return self.state.layer is not None and self._config.randomize == "cluster"

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
        if self._populations is None or self._config.randomize == "cluster":
            return True
        key = self.draw_key(unit, cluster_id)
        return any(population.may_include(self.state.salt, key) for population in self._populations)

    def has_same_arm_in_all_epochs(self, unit: str) -> bool:
        """Return True if every epoch so far is known to draw the same arm for the unit.

        It is never known where clusters or blocks are assigned, because the unit may have begun in another one.
        """
        past = self._past
        return self._config.randomize == "session" and past is not None and len(past) <= MAX_TABLES and past.agree(unit)

    def draw(self, unit: str, cluster_id: str | None, sure: bool = True) -> UnitArm:
        """Draw the arm of a unit that has none yet. A unit that names no cluster is its own cluster."""
        config = self._config
        assignment, cluster = draw_arm(
            self.table, config.randomize, unit, cluster=cluster_id or unit, at=time.time(), block_s=config.block_s
        )
        return UnitArm(assignment, cluster, sure)

    def present_assignment(self, assignment: Assignment) -> Assignment:
        """Return the present assignment of a unit that has this one.

        With `on_rollback: cut`, units of a rolled-back arm continue with the control. So do those that another gateway
        has assigned to an arm that this one's config lacks.
        """
        state = self.state
        arm = assignment.arm
        ends_here = (state.on_rollback == "cut" and arm in state.rolled_back) or arm not in self._config.arms
        return self.control_assignment if ends_here else assignment
