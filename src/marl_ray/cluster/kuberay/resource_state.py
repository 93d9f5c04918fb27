"""How any resource of KubeRay stands."""

from collections.abc import Callable, Mapping

from marl_ray.cluster.kuberay.cluster_state import cluster_state
from marl_ray.cluster.kuberay.cron_job_state import cron_job_state
from marl_ray.cluster.kuberay.job_state import job_state
from marl_ray.cluster.kuberay.service_state import service_state
from marl_ray.cluster.kuberay.states import ResourceState
from marl_ray.cluster.kuberay.view import ResourceKind, View

STATES: Mapping[ResourceKind, Callable[[View, float], ResourceState]] = {
    "RayCluster": cluster_state,
    "RayCronJob": cron_job_state,
    "RayJob": job_state,
    "RayService": service_state,
}


def resource_state(view: View, now: float) -> ResourceState:
    """Where the resource stands at `now`, seconds since 1970."""
    return STATES[view.kind](view, now)
