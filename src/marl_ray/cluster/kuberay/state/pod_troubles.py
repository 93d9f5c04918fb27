"""The reason that keeps a pod from running, which KubeRay's resources do not tell: they stay `Initializing`."""

from collections.abc import Iterable

from marl_ray.cluster.kuberay.state.view import Object, seconds_of

LOOP_REASONS = frozenset({
    "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError",
})  # fmt: skip
"""Reasons of a waiting container that do not pass by themselves, or seldom."""
SCHEDULED_S = 10.0
"""Seconds without a node after which a pod counts as one that no node takes."""


def trouble_of(pods: Iterable[Object], now: float) -> tuple[str, str] | None:
    """Return the reason and message of the first pod that does not come up.

    None where all run or are on their way at `now`, seconds since 1970.
    """
    staying_pods = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    late_pods = [pod for pod in staying_pods if now - seconds_of(pod["metadata"]["creationTimestamp"]) >= SCHEDULED_S]
    troubles = (*map(_crash_trouble, staying_pods), *map(_node_trouble, late_pods))
    return next((trouble for trouble in troubles if trouble), None)


def _crash_trouble(pod: Object) -> tuple[str, str] | None:
    """Return the reason and message of a pod whose container does not start or keeps crashing; else None."""
    status = pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        last = (container.get("lastState") or {}).get("terminated") or {}
        # Between two crashes a container runs for a moment and is not ready.
        crashes = bool(last.get("exitCode")) and not container.get("ready")
        if waiting.get("reason") in LOOP_REASONS or crashes:
            reason = waiting.get("reason") if waiting.get("reason") in LOOP_REASONS else "CrashLoopBackOff"
            text = f"its last exit code was {last['exitCode']}" if "exitCode" in last else waiting.get("message")
            restarts = f" ({container['restartCount']} restarts)" if container.get("restartCount") else ""
            return str(reason), f"{_pod_label(pod)}, container {container['name']}{restarts}: {text or 'no message'}"
    return None


def _node_trouble(pod: Object) -> tuple[str, str] | None:
    """Return the reason and message of a pod that no node takes; else None.

    A cluster that adds nodes leaves pods so for minutes, too.
    """
    if pod["spec"].get("nodeName") or (pod.get("status") or {}).get("phase", "Pending") != "Pending":
        return None
    conditions = (pod.get("status") or {}).get("conditions") or ()
    scheduled: Object = next((condition for condition in conditions if condition["type"] == "PodScheduled"), {})
    text = scheduled.get("message") or f"it asks for {_requests(pod) or 'nothing special'}"
    return "Unschedulable", f"{_pod_label(pod)} waits for a node: {text}"


def _requests(pod: Object) -> str:
    requests = [
        f"{name} {amount}"
        for container in pod["spec"].get("containers") or ()
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items()
    ]
    return ", ".join(dict.fromkeys(requests))


def _pod_label(pod: Object) -> str:
    labels = pod["metadata"].get("labels") or {}
    group = labels.get("ray.io/group")
    return f"pod {pod['metadata']['name']}" + (f" (group {group})" if group else "")
