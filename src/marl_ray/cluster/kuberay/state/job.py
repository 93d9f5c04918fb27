"""The state of a RayJob."""

import re

from marl_ray.cluster.kuberay.state.cluster import held_up_state, refused_state
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import SUBMITTER_CONTAINER, Object, View, seconds_of

REFUSAL_REASONS = ("InvalidRayJobSpec", "InvalidRayJobMetadata", "InvalidRayJobStatus")
"""Reasons of the events by which the operator refuses a RayJob."""
SETTLED_S = 30.0
"""Seconds after a submitter's end by which its job, if it is still `Initializing`, stays so for ever."""
_EXIT_STATUS = re.compile(r"failed with exit code (\d+)")


def job_state(view: View, now: float) -> ResourceState:
    """Return the state of a RayJob that is there, at `now`, seconds since 1970."""
    status, deployment = view.status, view.status.get("jobDeploymentStatus") or "New"
    message = first_line(status.get("message"))
    match deployment:
        case "Complete" if status.get("jobStatus") == "STOPPED":  # which the operator counts as a success
            message = message or "somebody stopped its entrypoint"
            # No deletion rule is for this end.
            stays = "; its cluster stays until it is deleted" if _has_deletion_rules(view) else ""
            return ResourceState(Phase.FAILED, "Stopped", message + stays)
        case "Complete":
            return ResourceState(Phase.SUCCEEDED, "Complete", message, 0)
        case "Failed" | "ValidationFailed":
            # A late job still says that its entrypoint runs, so its last words are about that.
            match = _EXIT_STATUS.search(str(status.get("message"))) if status.get("jobStatus") == "FAILED" else None
            code = int(match[1]) if match else None
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
            return _early_end_state(view, now) or held_up_state(view, now) or _provisioning_state(view)
    refused = refused_state(view, REFUSAL_REASONS) if deployment == "New" else None
    return refused or ResourceState(Phase.WAITING, deployment, message)


def _provisioning_state(view: View) -> ResourceState:
    conditions = (view.status.get("rayClusterStatus") or {}).get("conditions") or ()
    head: Object = next((condition for condition in conditions if condition["type"] == "HeadPodReady"), {})
    message = "its workers come up" if head.get("status") == "True" else "its head comes up"
    return ResourceState(Phase.WAITING, "Initializing", message)


def _early_end_state(view: View, now: float) -> ResourceState | None:
    """Return the state of a job in SidecarMode whose submitter has ended before all workers were ready; else None.

    The submitter is a container of the head pod, and nobody starts it again.
    """
    assert view.resource is not None
    if view.resource["spec"].get("submissionMode") != "SidecarMode":
        return None
    for pod in view.pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            termination = (container.get("state") or {}).get("terminated") or {}
            if container["name"] == SUBMITTER_CONTAINER and termination.get("finishedAt"):
                if now - seconds_of(termination["finishedAt"]) < SETTLED_S:
                    return None
                text = "its submitter has ended before all workers were ready, and the operator waits for ever"
                trouble = held_up_state(view, now)
                return ResourceState(
                    Phase.FAILED, "SubmitterEnded", text if trouble is None else f"{text}; {trouble.message}"
                )
    return None


def _has_deletion_rules(view: View) -> bool:
    assert view.resource is not None
    return bool((view.resource["spec"].get("deletionStrategy") or {}).get("deletionRules"))


def first_line(message: object) -> str:
    """Return the line of a message that says what happened; what follows are logs."""
    lines = str(message or "").strip().splitlines()
    return lines[0].removesuffix(", last available logs (truncated to 20,000 chars):") if lines else ""
