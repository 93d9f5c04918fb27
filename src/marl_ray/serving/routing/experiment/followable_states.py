"""The part of a new state that a replica can follow, if its config lacks some of the state's arms.

Another gateway at the same database, whose config is newer, may have added them.
"""

import math
from collections.abc import Set as AbstractSet
from dataclasses import replace

from marl_ray.experiments.store.records import AssignmentState


def unknown_arms(arms: AbstractSet[str], state: AssignmentState) -> frozenset[str]:
    """Return the arms by which a state assigns, its control among them, that are not among a config's `arms`."""
    return state.assigning_arms - arms


def followable_state(arms: AbstractSet[str], present: AssignmentState, state: AssignmentState) -> AssignmentState:
    """Return the new state itself, or what a replica can follow of one that has `unknown_arms`.

    That is the present state without the arms that the new one has rolled back; as in `lifecycle.weights_of` the
    control inherits their weight.
    """
    if not unknown_arms(arms, state):
        return state
    barred = (state.rolled_back - present.rolled_back) & arms - {present.control}
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
