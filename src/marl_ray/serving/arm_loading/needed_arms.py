"""The experiments that a gateway serves, and the arms that each of them needs."""

from collections.abc import Collection, Mapping

from marl_ray.experiments.lifecycle import OPEN_STATUSES, ExperimentStatus
from marl_ray.experiments.store.records import AssignmentState
from marl_ray.serving.routing.endpoints import DRAIN_S

API_ORIGIN = "api"
"""`origin` of stored experiments that no gateway's config names; every replica loads them from the store."""


def served_here(states: Mapping[str, AssignmentState], configured: Collection[str]) -> list[AssignmentState]:
    """Return the experiments that a gateway serves, of its config or created over HTTP."""
    return [state for name, state in states.items() if state.origin == API_ORIGIN or name in configured]


def needed_arms(
    states: Collection[AssignmentState], now: float, ended: Mapping[str, float] | None = None
) -> dict[str, frozenset[str]]:
    """Return experiment -> the arms that it needs to be loaded.

    An open experiment needs all arms, because each may have or get sessions. An experiment that has ended but still
    serves its endpoint needs the arm with the traffic and the control, which takes over if harm by the winner is proven
    late. Older experiments need none. For `DRAIN_S` after an experiment ended or its successor began it needs all arms,
    so that sessions can finish. `ended` is the end of experiments that this process has seen end, in seconds since 1970.
    """
    newest: dict[str, AssignmentState] = {}
    successors: dict[str, float] = {}
    """Experiment -> the moment when the next one at its endpoint began."""
    begun = (state for state in states if state.status is not ExperimentStatus.DRAFT)
    for state in sorted(begun, key=lambda state: state.created):
        if state.endpoint in newest:
            successors[newest[state.endpoint].experiment] = state.created
        newest[state.endpoint] = state
    arms_of = {}
    for state in states:
        name = state.experiment
        over = max(successors.get(name, -DRAIN_S), (ended or {}).get(name, -DRAIN_S))
        arms = set()
        if state.status in OPEN_STATUSES or now - over < DRAIN_S:
            arms = set(state.weights) - (state.rolled_back if state.on_rollback == "cut" else frozenset())
        elif newest.get(state.endpoint) is state:
            arms = set(state.assigning_arms)
        arms_of[name] = frozenset(arms)
    return arms_of
