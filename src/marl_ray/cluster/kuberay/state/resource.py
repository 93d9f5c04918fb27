"""The state of any resource of KubeRay."""

from collections.abc import Callable, Mapping

from marl_ray.cluster.kuberay.state.cluster import cluster_state
from marl_ray.cluster.kuberay.state.cron_job import cron_job_state
from marl_ray.cluster.kuberay.state.job import job_state
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.service import service_state
from marl_ray.cluster.kuberay.state.view import ResourceKind, View

STATE_FUNCTIONS: Mapping[ResourceKind, Callable[[View, float], ResourceState]] = {
    "RayCluster": cluster_state,
    "RayCronJob": cron_job_state,
    "RayJob": job_state,
    "RayService": service_state,
}
"""Kind -> the function of a view and of the seconds since 1970 that tells the state."""
END_TEXTS = {
    "RayCluster": "its pods end",
    "RayCronJob": "it makes no further RayJob",
    "RayJob": "its cluster ends",
    "RayService": "its clusters end",
}
"""Kind -> the message while a resource is being deleted."""


def resource_state(view: View, now: float) -> ResourceState:
    """Return the state of the resource at `now`, seconds since 1970."""
    if view.resource is None:
        return ResourceState(Phase.GONE, "NotFound", f"there is no {view.kind} {view.name}")
    if view.resource["metadata"].get("deletionTimestamp"):
        return ResourceState(Phase.WAITING, "Deleting", END_TEXTS[view.kind])
    return STATE_FUNCTIONS[view.kind](view, now)
