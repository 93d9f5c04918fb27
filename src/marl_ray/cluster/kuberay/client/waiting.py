"""Waits until a resource is in a wanted state or in another final one, with a deadline."""

import time
from collections.abc import Callable, Collection

from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.client.watching import follow
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import ResourceKind
from marl_ray.errors import MarlRayError

FINAL_PHASES = (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)
DEFAULT_GOALS: dict[ResourceKind, Collection[Phase]] = {
    "RayCluster": (Phase.READY,),
    "RayCronJob": (Phase.READY,),
    "RayJob": (Phase.SUCCEEDED,),
    "RayService": (Phase.READY,),
}
"""Kind -> the phases that end a wait unless the caller names others."""


class WaitTimeoutError(MarlRayError):
    """A resource did not come to the state that was waited for."""


def wait(
    connection: Connection,
    kind: ResourceKind,
    name: str,
    goals: Collection[Phase],
    timeout_s: float,
    say: Callable[[ResourceState], object],
    start_s: float | None = None,
) -> ResourceState:
    """Return the first state whose phase is one of the goals, or is final.

    `say` gets every state that differs from the one before. `start_s` bounds the seconds of one stretch in the phase
    WAITING, for what may run for days once it runs. Raises WaitTimeoutError, which names what held it up, and
    MarlRayError if the API stays out of reach.
    """
    began = waiting_since = time.monotonic()
    last: ResourceState | None = None
    for state in follow(connection, kind, name, began + timeout_s):
        if state != last:
            say(state)
        last = state
        if state.phase in goals or (state.phase in FINAL_PHASES and Phase.GONE not in goals):
            return state
        if state.phase is not Phase.WAITING:
            waiting_since = time.monotonic()
        elif start_s is not None and time.monotonic() - waiting_since > start_s:
            raise WaitTimeoutError(f"{kind} {name} did not start within {start_s:g} s: {state}")
    expected = " or ".join(goals)
    raise WaitTimeoutError(f"{kind} {name} is not {expected} after {timeout_s:g} s: {last}")
