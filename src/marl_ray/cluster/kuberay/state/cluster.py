"""The state of a RayCluster. One that the operator refuses has no status at all, only an event."""

from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.pod_troubles import trouble_of
from marl_ray.cluster.kuberay.state.view import Object, View, event_text, subject

REFUSAL_REASONS = ("InvalidRayClusterSpec", "InvalidRayClusterMetadata", "InvalidRayClusterStatus")
"""Reasons of the events by which the operator refuses a RayCluster."""


def cluster_state(view: View, now: float) -> ResourceState:
    """Return the state of a RayCluster that is there, at `now`, seconds since 1970."""
    status = view.status
    refused = refused_state(view, REFUSAL_REASONS)
    if refused is not None and not status.get("state"):
        return refused
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if status.get("state") == "suspended":
        return ResourceState(Phase.SUSPENDED, "Suspended", "it has no pods until it is resumed")
    if status.get("state") == "failed":
        return ResourceState(Phase.FAILED, "Failed", str(status.get("reason") or "the operator tells no reason"))
    head = conditions.get("HeadPodReady", {})
    if status.get("state") == "ready" and head.get("status", "True") == "True" and not view.is_outdated:
        workers = f"{status.get('readyWorkerReplicas') or 0} of {status.get('desiredWorkerReplicas') or 0} workers"
        return ResourceState(Phase.READY, "Ready", f"head and {workers} are ready")
    return held_up_state(view, now) or ResourceState(
        Phase.WAITING, head.get("reason") or "New", " ".join((head.get("message") or "").split()).rstrip(": ")
    )


def held_up_state(view: View, now: float) -> ResourceState | None:
    """Return a state that names the pod that does not come up, or why the operator cannot make it.

    Such a reason is a quota, or a value that is refused. None if nothing holds the resource up.
    """
    reasons = (*map(_pod_failure, view.ray_clusters), _cluster_refusal(view))
    trouble = trouble_of(view.pods, now) or next(filter(None, reasons), None)
    return None if trouble is None else ResourceState(Phase.WAITING, *trouble)


def _pod_failure(cluster: Object) -> tuple[str, str] | None:
    """Return the reason and message with which the operator fails to make or delete a cluster's pods.

    Both are those of the condition `ReplicaFailure`; None without it.
    """
    conditions = (cluster.get("status") or {}).get("conditions") or ()
    failure = next(
        (
            condition
            for condition in conditions
            if (condition["type"], condition["status"]) == ("ReplicaFailure", "True")
        ),
        None,
    )
    if failure is None:
        return None
    # The operator writes the reason as the message's first line.
    return failure["reason"], " ".join(failure["message"].removeprefix(failure["reason"]).split())


def _cluster_refusal(view: View) -> tuple[str, str] | None:
    """Return the reason and message with which the operator refuses a cluster that it made for a job or a service.

    None if it refuses none.
    """
    new_clusters = {
        ("RayCluster", cluster["metadata"]["name"])
        for cluster in view.clusters
        if not (cluster.get("status") or {}).get("state")
    }
    refusals = (event for event in reversed(view.warnings) if event.get("reason") in REFUSAL_REASONS)
    last = next((event for event in refusals if subject(event) in new_clusters), None)
    return None if last is None else (str(last["reason"]), event_text(last))


def refused_state(view: View, reasons: tuple[str, ...]) -> ResourceState | None:
    """Return a state made of the last event by which the operator refuses the specification; None without one."""
    last = next((warning for warning in reversed(view.warnings) if warning.get("reason") in reasons), None)
    return None if last is None else ResourceState(Phase.FAILED, str(last["reason"]), event_text(last))
