"""The state of a RayService, by its applications first: `serviceStatus` stays `Running` while one is broken."""

from marl_ray.cluster.kuberay.state.cluster import held_up_state, refused_state
from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.view import Object, View

REFUSAL_REASONS = ("InvalidRayServiceSpec", "InvalidRayServiceMetadata")
"""Reasons of the events by which the operator refuses a RayService."""
BROKEN_STATUSES = ("DEPLOY_FAILED",)
"""Statuses of an application that Serve does not try again."""


def service_state(view: View, now: float) -> ResourceState:
    """Return the state of a RayService that is there, at `now`, seconds since 1970."""
    status = view.status
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if conditions.get("Suspended", {}).get("status") == "True":
        return ResourceState(Phase.SUSPENDED, "Suspended", "it has no cluster until it is resumed")
    active, pending = _applications(status, "activeServiceStatus"), _applications(status, "pendingServiceStatus")
    for name, application in [*pending.items(), *active.items()]:
        if application.get("status") in BROKEN_STATUSES:
            return ResourceState(
                Phase.FAILED, application["status"], f"application {name}: {last_line(application.get('message'))}"
            )
    refused = refused_state(view, REFUSAL_REASONS)
    if refused is not None and not active:
        return refused
    if conditions.get("UpgradeInProgress", {}).get("status") == "True":
        return held_up_state(view, now) or ResourceState(Phase.WAITING, "UpgradeInProgress", "the new cluster comes up")
    for name, application in (active or pending).items():
        if application.get("status") != "RUNNING":
            text = last_line(application.get("message"))
            return held_up_state(view, now) or ResourceState(
                Phase.WAITING,
                application.get("status") or "DEPLOYING",
                f"application {name}" + (f": {text}" if text else ""),
            )
    ready = conditions.get("Ready", {})
    if view.is_outdated:
        return ResourceState(Phase.WAITING, "New", "the operator has not looked at its newest specification")
    if ready.get("status") == "True" and active:
        return ResourceState(Phase.READY, "Running", f"{', '.join(active)}: {ready.get('message') or 'serving'}")
    return held_up_state(view, now) or ResourceState(
        Phase.WAITING, ready.get("reason") or "New", str(ready.get("message") or "the operator has not looked at it")
    )


def _applications(status: Object, key: str) -> dict[str, Object]:
    return dict((status.get(key) or {}).get("applicationStatuses") or {})


def last_line(message: object) -> str:
    """Return the line of a traceback that says what is wrong."""
    lines = [line for line in str(message or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
