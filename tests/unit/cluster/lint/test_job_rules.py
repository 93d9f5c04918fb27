"""Rules for RayJobs and RayCronJobs that no schema says."""

import copy
from typing import Any

import pytest

from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.lint.linter import lint_manifest
from marl_ray.config.cluster import ClusterConfig
from marl_ray.config.load import parse_config

CONFIG: dict[str, Any] = {
    "name": "train",
    "image": "registry.example.com/marl-ray:0.1.0",
    "groups": {"learners": {"replicas": 2}},
    "volumes": [{"claim": "runs", "path": "/runs"}],
    "job": {"entrypoint": "marl-ray train config.yaml", "retries": 1},
}
[JOB, *_] = render(parse_config(ClusterConfig, CONFIG))
RULE = {"policy": "DeleteCluster", "condition": {"jobStatus": "SUCCEEDED", "ttlSeconds": 10}}
LEGACY = {"onSuccess": {"policy": "DeleteSelf"}, "onFailure": {"policy": "DeleteNone"}}
SELECTED = {
    "clusterSelector": {"ray.io/cluster": "mine"},
    "rayClusterSpec": None,
    "backoffLimit": 0,
    "deletionStrategy": None,
}


def findings(changes: dict[str, Any], kind: str = "RayJob") -> list[str]:
    """Findings of the job with other values in its specification; None takes a key away."""
    spec = copy.deepcopy(JOB["spec"]) | changes
    spec = {key: value for key, value in spec.items() if value is not None}
    if kind == "RayCronJob":
        spec = {"schedule": "0 3 * * *", "jobTemplate": spec}
    return lint_manifest({"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "train"}, "spec": spec}, "f")


@pytest.mark.parametrize("kind", ["RayJob", "RayCronJob"])
def test_good_jobs_have_no_finding(kind):
    assert findings({}, kind) == []
    assert findings(SELECTED | {"submitterPodTemplate": None}, kind) == []
    assert (
        findings({"deletionStrategy": None, "shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 5}, kind) == []
    )
    assert findings({"deletionStrategy": LEGACY}, kind) == []


def test_a_queued_job_may_be_suspended():
    [job, *_] = render(parse_config(ClusterConfig, CONFIG | {"queue": "team-a"}))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["spec"]["shutdownAfterJobFinishes"] and "deletionStrategy" not in job["spec"]
    job["spec"]["suspend"] = True
    assert lint_manifest(job, "f") == []


WRONG = [
    ({"rayClusterSpec": None}, "spec.rayClusterSpec: expected it, or clusterSelector"),
    ({"entrypoint": "", "submitterPodTemplate": None}, "spec.entrypoint: missing key"),
    ({"suspend": True}, "spec.shutdownAfterJobFinishes: expected true beside suspend"),
    ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds: expected more than 0, got 0"),
    ({"submissionMode": "Http"}, "spec.submissionMode: expected one of K8sJobMode"),
    (SELECTED | {"backoffLimit": 2}, "spec.backoffLimit: expected 0 beside clusterSelector"),
    (SELECTED | {"clusterSelector": {"app": "x"}}, "spec.clusterSelector: expected ray.io/cluster"),
    (
        SELECTED | {"submissionMode": "SidecarMode", "submitterPodTemplate": None},
        "spec.clusterSelector: expected none in S",
    ),
    ({"submissionMode": "InteractiveMode"}, "spec.backoffLimit: expected 0 in InteractiveMode"),
    ({"submissionMode": "SidecarMode"}, "spec.submitterPodTemplate: expected none in SidecarMode"),
    ({"shutdownAfterJobFinishes": True}, "spec.shutdownAfterJobFinishes: expected none beside deletionStrategy"),
    ({"deletionStrategy": None, "ttlSecondsAfterFinished": 5}, "spec.ttlSecondsAfterFinished: expected shutdownAfter"),
    ({"deletionStrategy": {}}, "spec.deletionStrategy: expected deletionRules, or onSuccess and onFailure"),
    ({"deletionStrategy": {"deletionRules": [RULE, RULE]}}, "deletionRules.1: expected one rule for DeleteCluster"),
    (
        {
            "deletionStrategy": {
                "deletionRules": [
                    RULE,
                    RULE | {"policy": "DeleteWorkers", "condition": RULE["condition"] | {"ttlSeconds": 20}},
                ]
            }
        },
        "expected DeleteCluster after DeleteWorkers",
    ),
    (
        {"deletionStrategy": {"deletionRules": [RULE], "onSuccess": {"policy": "DeleteSelf"}}},
        "onSuccess: expected none",
    ),
    (
        SELECTED | {"deletionStrategy": {"deletionRules": [RULE]}},
        "expected another than DeleteCluster beside clusterSelector",
    ),
    ({"deletionStrategy": LEGACY | {"onSuccess": {}}}, "deletionStrategy.onSuccess.policy: missing key"),
    ({"deletionStrategy": LEGACY | {"deletionRules": [RULE], "onSuccess": {}}}, "onSuccess: expected none beside"),
    (
        {"deletionStrategy": {"deletionRules": [RULE | {"condition": {}}]}},
        "deletionRules.0.condition: expected either jobStatus or jobDeploymentStatus",
    ),
    (
        {
            "deletionStrategy": {
                "deletionRules": [RULE | {"condition": {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed"}}]
            }
        },
        "deletionRules.0.condition: expected either jobStatus or jobDeploymentStatus",
    ),
    ({"backoffLimit": -1}, "spec.backoffLimit: expected 0 or more, got -1"),
    (
        {"deletionStrategy": None, "shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": -1},
        "spec.ttlSecondsAfterFinished: expected 0 or more, got -1",
    ),
    (
        {"submissionMode": "SidecarMode", "submitterPodTemplate": None, "submitterConfig": {}},
        "spec.submitterConfig: expected none in SidecarMode",
    ),
    (
        {"submitterPodTemplate": {"spec": {"restartPolicy": "Always", "containers": [{"name": "x", "image": "a:1"}]}}},
        "spec.submitterPodTemplate.spec.restartPolicy: expected Never or OnFailure",
    ),
    ({"managedBy": "me"}, "spec.managedBy: expected one of ray.io/kuberay-operator"),
    *[
        ({"rayClusterSpec": JOB["spec"]["rayClusterSpec"] | part}, f"spec.rayClusterSpec.{words}")
        for part, words in (
            ({"managedBy": "me"}, "managedBy: expected one of ray.io/kuberay-operator"),
            ({"upgradeStrategy": {"type": "None"}}, "upgradeStrategy.type: expected none"),
            (
                {"authOptions": {"mode": "token", "enableK8sTokenAuth": True}},
                "authOptions.enableK8sTokenAuth: expected none: only a RayCluster",
            ),
        )
    ],
    ({"runtimeEnvYAML": "[1]"}, "spec.runtimeEnvYAML: expected a mapping"),
    ({"runtimeEnvYAML": "a: ["}, "spec.runtimeEnvYAML: expected YAML"),
    (
        {"runtimeEnvYAML": "env_vars: {WANDB_API_KEY: abc}"},
        "spec.runtimeEnvYAML: advice: expected no secret in env_vars.WANDB_API_KEY",
    ),
    ({"runtimeEnvYAML": "a: 2026-13-01"}, "spec.runtimeEnvYAML: expected YAML"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_a_broken_rule_is_one_line_that_names_the_key(change, words):
    lines = findings(change)
    assert any(words in line for line in lines), lines
    assert all("\n" not in line for line in lines)
    inside = [line.replace("spec.jobTemplate.", "spec.") for line in findings(change, "RayCronJob")]
    assert sorted(inside) == sorted(lines)


def test_a_retry_needs_storage_that_outlives_a_cluster():
    [job, *_] = render(parse_config(ClusterConfig, CONFIG | {"volumes": []}))
    assert [line.split(": ")[1] for line in lint_manifest(job, "f")] == ["spec.backoffLimit"]
    job["spec"]["entrypoint"] += " storage=s3://bucket/runs"
    assert lint_manifest(job, "f") == []


def clock(**spec: str) -> list[str]:
    """Findings of a RayCronJob with these keys."""
    document = {"apiVersion": "ray.io/v1", "kind": "RayCronJob", "metadata": {"name": "train"}}
    return lint_manifest(document | {"spec": {"schedule": "0 3 * * *", "jobTemplate": JOB["spec"]} | spec}, "f")


@pytest.mark.parametrize("schedule", ["daily", "@noon", "@every soon", "0 3 * * 7", "TZ=Europe/Rome 0 3 * * *"])
def test_a_schedule_has_five_fields(schedule):
    assert clock(schedule=schedule) == [f"f: spec.schedule: expected five fields of cron, got {schedule!r}"]


@pytest.mark.parametrize("schedule", ["@hourly", "@every 1h30m", "0,30 1-5/2 ? JAN-mar mon", "5/15 * * * *"])
def test_a_schedule_may_be_what_the_operators_parser_knows(schedule):
    assert clock(schedule=schedule) == []


def test_a_time_zone_is_one_that_there_is():
    for name in ("Europe/Rome", "UTC", "Local"):
        assert clock(timeZone=name) == []
    for name in ("Mars/Olympus", "Europe", "/etc/passwd", "../UTC"):
        assert clock(timeZone=name) == [
            f"f: spec.timeZone: expected the name of a time zone such as Europe/Berlin, got {name!r}"
        ]
