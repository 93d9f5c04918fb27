"""The state of a RayJob."""

import re

from marl_ray.cluster.kuberay.state.cluster_state import held_up_state, refused_state
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import SUBMITTER_CONTAINER, Object, View, seconds_of

REFUSAL_REASONS = ("InvalidRayJobSpec", "InvalidRayJobMetadata", "InvalidRayJobStatus")
"""Reasons of events."""
SETTLED_S = 30.0
"""A submitter that ended so long ago, while its job is `Initializing`, has ended too early: the operator waits for ever."""
_STATUS = re.compile(r"failed with exit code (\d+)")


def job_state(view: View, now: float) -> ResourceState:
    """Return the state of a RayJob that is there, at `now`, seconds since 1970."""
    status, deployment = view.status, view.status.get("jobDeploymentStatus") or "New"
    message = first_line(status.get("message"))
    match deployment:
        case "Complete" if status.get("jobStatus") == "STOPPED":  # the operator takes any end but FAILED for a success
            message = message or "somebody stopped its entrypoint"
            # No rule of deletion may name this end.
            stays = "; its cluster stays until it is deleted" if _has_rules(view) else ""
            return ResourceState(Phase.FAILED, "Stopped", message + stays)
        case "Complete":
            return ResourceState(Phase.SUCCEEDED, "Complete", message, 0)
        case "Failed" | "ValidationFailed":
            # A late job still says that its entrypoint runs, so its last words are about that.
            ended = _STATUS.search(str(status.get("message"))) if status.get("jobStatus") == "FAILED" else None
            code = int(ended[1]) if ended else None
            return ResourceState(Phase.FAILED, status.get("reason") or deployment, message, code)
        case "Suspended":
            return ResourceState(Phase.SUSPENDED, "Suspended", "it has no cluster until it is resumed")
        case "Running":
            job = status.get("jobStatus") or "PENDING"
            if job == "RUNNING":
                return held_up_state(view, now) or ResourceState(Phase.RUNNING, "Running", message)
            return ResourceState(Phase.RUNNING, "Running", message or f"the entrypoint is {job}")
        case "Retrying":
            return ResourceState(Phase.WAITING, "Retrying", f"{message}; it is tried again on a new cluster")
        case "Suspending":
            return ResourceState(Phase.WAITING, "Suspending", "its cluster ends")
        case "Initializing":
            return _ended_early(view, now) or held_up_state(view, now) or _provisioning(view)
    refused = refused_state(view, REFUSAL_REASONS) if deployment == "New" else None
    return refused or ResourceState(Phase.WAITING, deployment, message)


def _provisioning(view: View) -> ResourceState:
    conditions = (view.status.get("rayClusterStatus") or {}).get("conditions") or ()
    head: Object = next((condition for condition in conditions if condition["type"] == "HeadPodReady"), {})
    ready = "its workers come up" if head.get("status") == "True" else "its head comes up"
    return ResourceState(Phase.WAITING, "Initializing", ready)


def _ended_early(view: View, now: float) -> ResourceState | None:
    """Return the state of a job in SidecarMode whose submitter has ended.

    The submitter is a container of the head pod, and nobody starts it again.
    """
    assert view.resource is not None
    if view.resource["spec"].get("submissionMode") != "SidecarMode":
        return None
    for pod in view.pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (container.get("state") or {}).get("terminated") or {}
            if container["name"] == SUBMITTER_CONTAINER and ended.get("finishedAt"):
                if now - seconds_of(ended["finishedAt"]) < SETTLED_S:
                    return None
                text = "its submitter has ended before all workers were ready, and the operator waits for ever"
                trouble = held_up_state(view, now)
                return ResourceState(
                    Phase.FAILED, "SubmitterEnded", text if trouble is None else f"{text}; {trouble.message}"
                )
    return None


def _has_rules(view: View) -> bool:
    assert view.resource is not None
    return bool((view.resource["spec"].get("deletionStrategy") or {}).get("deletionRules"))


def first_line(message: object) -> str:
    """Return the line of a message that says what happened; what follows are logs."""
    lines = str(message or "").strip().splitlines()
    return lines[0].removesuffix(", last available logs (truncated to 20,000 chars):") if lines else ""
