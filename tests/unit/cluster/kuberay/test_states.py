"""The states of resources, on every recorded story of KubeRay's operator."""

import pytest
from kube.stories import STORIES, states

from marl_ray.cluster.kuberay.state.phases import Phase, ResourceState
from marl_ray.cluster.kuberay.state.resource import resource_state
from marl_ray.cluster.kuberay.state.view import View, event_text, seconds_of, view_of

ENDS = {
    "raycluster-autoscales": (Phase.READY, "Ready", "head and 0 of 0 workers are ready"),
    "raycluster-ready-suspended-deleted": (Phase.GONE, "NotFound", "no RayCluster"),
    "raycluster-refused-by-the-operator": (Phase.FAILED, "InvalidRayClusterSpec", "ft-enabled annotation and Gcs"),
    "raycronjob-every-minute": (Phase.READY, "Scheduled", "2026-11-22T10:30:00Z"),
    "rayjob-deadline": (Phase.FAILED, "DeadlineExceeded", "activeDeadlineSeconds"),
    "rayjob-deleted-while-running": (Phase.GONE, "NotFound", "no RayJob"),
    "rayjob-existing-cluster": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-fails": (Phase.FAILED, "AppFailed", "Job entrypoint command failed with exit code 3"),
    "rayjob-head-lost": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-http-mode": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-learner-lost-and-resumed": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-refused-by-the-operator": (Phase.FAILED, "ValidationFailed", "BackoffLimit is incompatible with Cluster"),
    "rayjob-retries-once": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-sidecar-mode": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-sidecar-mode-never-ready": (Phase.FAILED, "SubmitterEnded", "before all workers were ready"),
    "rayjob-succeeds": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-suspended-and-resumed": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayjob-unschedulable": (Phase.WAITING, "Unschedulable", "(group workers) waits for a node: it asks for"),
    "rayjob-worker-crashes": (Phase.WAITING, "CrashLoopBackOff", "its last exit code was 2"),
    "rayjob-worker-lost": (Phase.SUCCEEDED, "Complete", "finished successfully"),
    "rayservice-application-broken": (Phase.FAILED, "DEPLOY_FAILED", "application app: "),
    "rayservice-config-changed-in-place": (Phase.FAILED, "DEPLOY_FAILED", "has no attribute 'gone'"),
    "rayservice-head-lost": (Phase.READY, "Running", "app: "),
    "rayservice-up-and-upgraded": (Phase.READY, "Running", "app: "),
    "rayservice-worker-lost": (Phase.READY, "Running", "app: "),
}
"""The state in which each story ends, a minute after its last event."""
BETWEEN = {
    "rayjob-retries-once": ["waiting/Initializing", "running/Running", "waiting/Retrying", "running/Running"],
    "rayjob-suspended-and-resumed": ["running/Running", "waiting/Suspending", "suspended/Suspended", "running/Running"],
    "rayservice-config-changed-in-place": [
        "ready/Running",
        "waiting/DEPLOYING",
        "ready/Running",
        "failed/DEPLOY_FAILED",
    ],
    "rayservice-up-and-upgraded": [
        "waiting/Initializing",
        "ready/Running",
        "waiting/UpgradeInProgress",
        "ready/Running",
    ],
    "rayservice-head-lost": ["ready/Running", "waiting/DEPLOYING", "ready/Running"],
    "raycluster-ready-suspended-deleted": ["ready/Ready", "suspended/Suspended", "ready/Ready", "gone/NotFound"],
}
"""States that follow each other, with others between them."""


def test_every_story_is_here():
    assert sorted(ENDS) == STORIES


@pytest.mark.parametrize("story", STORIES)
def test_a_story_ends_in_a_named_state(story):
    phase, reason, message = ENDS[story]
    seen = states(story, later_s=60.0)
    assert (seen[-1].phase, seen[-1].reason) == (phase, reason) and message in seen[-1].message
    assert all("\n" not in state.message for state in seen)
    early = [state for state in seen[:-1] if state.phase is Phase.FAILED and state[:2] != seen[-1][:2]]
    assert [state.reason for state in early] in ([], ["InvalidRayJobSpec"])  # nobody gives up on what succeeds later


@pytest.mark.parametrize("story", BETWEEN)
def test_a_story_goes_through_its_states(story):
    seen = iter([f"{state.phase}/{state.reason}" for state in states(story)])
    for name in BETWEEN[story]:
        assert name in seen, name


def test_only_an_entrypoint_that_has_ended_has_an_exit_status():
    assert states("rayjob-fails")[-1].status == 3
    assert states("rayjob-succeeds")[-1].status == 0
    for story in ("rayjob-deadline", "rayjob-refused-by-the-operator", "rayservice-application-broken"):
        assert states(story)[-1].status is None
    assert {state.status for state in states("rayjob-retries-once")} == {None, 0}


def test_a_job_that_somebody_stopped_has_not_succeeded():
    """The operator says `Complete` of every end but FAILED."""
    status = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED", "message": "Job was intentionally stopped."}
    job = {"metadata": {"name": "x", "generation": 1}, "spec": {}, "status": status}
    state = resource_state(View("RayJob", "x", job), 0.0)
    assert state == ResourceState(Phase.FAILED, "Stopped", "Job was intentionally stopped.")

    rules = {"deletionStrategy": {"deletionRules": [{"policy": "DeleteCluster", "condition": {"jobStatus": "FAILED"}}]}}
    message = resource_state(View("RayJob", "x", job | {"spec": rules}), 0.0).message
    assert message == "Job was intentionally stopped.; its cluster stays until it is deleted"


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob", "RayService"])
def test_a_pod_that_may_not_be_made_is_named(kind):
    """The operator's source has it so: an error of two lines, of which the first is the reason."""
    reason, quota = "FailedCreateHeadPod", 'pods "x-head" is forbidden: exceeded quota: memory'
    failure = {"type": "ReplicaFailure", "status": "True", "reason": reason, "message": f"{reason}\n{quota}"}
    metadata = {"name": "x", "generation": 1}
    cluster = {"metadata": metadata, "spec": {}, "status": {"conditions": [failure]}}
    job = {"metadata": metadata, "spec": {}, "status": {"jobDeploymentStatus": "Initializing"}}
    view = View(kind, "x", cluster) if kind == "RayCluster" else View(kind, "x", job, clusters=(cluster,))
    assert resource_state(view, 0.0) == ResourceState(Phase.WAITING, reason, quota)


def test_events_of_both_apis_are_read():
    about = {"namespace": "n", "name": "x"}
    assert event_text({"regarding": about, "note": "n/x: no  good"}) == "no good"
    assert event_text({"involvedObject": about, "message": "Bad n/x: reason"}) == "Bad: reason"
    assert seconds_of("2026-11-22T10:28:00Z") == 1795343280.0


@pytest.mark.parametrize("kind", ["RayJob", "RayService"])
def test_a_cluster_that_the_operator_refuses_to_a_job_is_named(kind):
    """The refusal is an event of the cluster alone; the job would say for ever that its head comes up."""
    labels = {"ray.io/originated-from-crd": kind, "ray.io/originated-from-cr-name": "mine"}
    cluster = {"kind": "RayCluster", "metadata": {"name": "mine-abcde", "labels": labels}, "spec": {}}
    status = {"jobDeploymentStatus": "Initializing"} if kind == "RayJob" else {}
    event = {
        "kind": "Event",
        "metadata": {"name": "e", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "type": "Warning",
        "reason": "InvalidRayClusterSpec",
        "involvedObject": {"kind": "RayCluster", "name": "mine-abcde", "namespace": "default"},
        "message": "The RayCluster spec is invalid default/mine-abcde: upgradeStrategy cannot be set",
    }
    resource = {"kind": kind, "metadata": {"name": "mine", "generation": 1}, "spec": {}, "status": status}
    state = resource_state(view_of(kind, "mine", [resource, cluster, event]), 0.0)
    assert state == (
        Phase.WAITING,
        "InvalidRayClusterSpec",
        "The RayCluster spec is invalid: upgradeStrategy cannot be set",
        None,
    )
    came_up = {**cluster, "status": {"state": "ready"}}
    state = resource_state(view_of(kind, "mine", [resource, came_up, event]), 0.0)
    assert (state.phase, state.reason) == (Phase.WAITING, "Initializing" if kind == "RayJob" else "New")
