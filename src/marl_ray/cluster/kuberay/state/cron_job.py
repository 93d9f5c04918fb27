"""The state of a RayCronJob, whose status only tells when it made a RayJob last."""

from marl_ray.cluster.kuberay.state.cluster import refused_state
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import View

REFUSAL_REASONS = ("InvalidRayCronJobSpec", "InvalidSchedule")
"""Reasons of the events by which the operator refuses a RayCronJob."""


def cron_job_state(view: View, now: float) -> ResourceState:
    """Return the state of a RayCronJob that is there; no state depends on `now`."""
    assert view.resource is not None
    if view.resource["spec"].get("suspend"):
        return ResourceState(Phase.SUSPENDED, "Suspended", "it makes no RayJob until it is resumed")
    refused = refused_state(view, REFUSAL_REASONS)
    if refused is not None:
        return refused
    last = view.status.get("lastScheduleTime")
    return ResourceState(
        Phase.READY, "Scheduled", f"it made its last RayJob at {last}" if last else "it has made no RayJob yet"
    )
