"""From the short config of a cluster to manifests that KubeRay takes."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from processes.command_line import marl_ray
from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources

from marl_ray.cluster.kuberay import submission
from marl_ray.cluster.kuberay.client.connection import Connection
from marl_ray.cluster.kuberay.manifests.pods import MARGIN_S, PRE_STOP_S, SPOT_LABELS
from marl_ray.cluster.kuberay.manifests.rendering import render, to_yaml
from marl_ray.cluster.lint.linter import lint_manifest
from marl_ray.config.cluster import ClusterConfig
from marl_ray.config.load import parse_config
from marl_ray.errors import MarlRayError

ROOT = Path(__file__).parents[3]
BASE: dict[str, Any] = {
    "name": "train",
    "image": "registry.example.com/marl-ray:0.1.0",
    "groups": {"learners": {"replicas": 2, "gpus": 1}, "rollouts": {"replicas": [0, 8], "spot": True}},
    "volumes": [{"claim": "runs", "path": "/runs"}],
}
JOB = {"job": {"entrypoint": "marl-ray train config.yaml"}}
SERVICE: dict[str, Any] = {"service": {"serve": {"applications": []}}}


def render_parts(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    merged: dict[str, Any] = {}
    for part in (BASE, *parts):
        merged |= part
    return render(parse_config(ClusterConfig, merged))


def cluster_of(resource: dict[str, Any]) -> dict[str, Any]:
    spec = resource["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


@pytest.mark.parametrize(("parts", "kind"), [({}, "RayCluster"), (JOB, "RayJob"), (SERVICE, "RayService")])
def test_what_is_rendered_has_no_finding(parts, kind):
    resource, *others = render_parts(parts)
    assert resource["kind"] == kind
    budgets = {"PodDisruptionBudget"} if kind == "RayService" else set()
    assert {item["kind"] for item in others} == {"NetworkPolicy"} | budgets
    assert [finding for item in (resource, *others) for finding in lint_manifest(item, kind)] == []


def test_a_job_by_the_clock_has_the_job_inside():
    [clock, *_] = render_parts({"job": JOB["job"] | {"schedule": "0 3 * * *", "time_zone": "Europe/Rome"}})
    [job, *_] = render_parts(JOB)
    assert (clock["kind"], clock["spec"]["schedule"], clock["spec"]["timeZone"]) == (
        "RayCronJob",
        "0 3 * * *",
        "Europe/Rome",
    )
    rules = clock["spec"]["jobTemplate"]["deletionStrategy"]["deletionRules"]
    taken_away = [rule for rule in rules if rule["policy"] == "DeleteSelf"]
    assert [rule["condition"]["ttlSeconds"] for rule in taken_away] == [604800, 604800]
    del rules[-2:]
    assert clock["spec"]["jobTemplate"] == job["spec"]


@pytest.mark.parametrize("parts", [{}, JOB, SERVICE])
def test_every_pod_is_confined_drains_and_gets_what_it_asks_for(parts):
    resource, *_ = render_parts(parts, {"drain_s": 45})
    cluster = cluster_of(resource)
    templates = [pod_group["template"] for pod_group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    templates += [resource["spec"]["submitterPodTemplate"]] if "submitterPodTemplate" in resource["spec"] else []
    for template in templates:
        spec, [container] = template["spec"], template["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]} >= {"tmp"}
    for template in templates[: 1 + len(cluster["workerGroupSpecs"])]:
        spec, [container] = template["spec"], template["spec"]["containers"]
        assert spec["terminationGracePeriodSeconds"] == PRE_STOP_S + 45 + MARGIN_S
        assert {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "45"} in container["env"]
        assert "shared-memory" in {volume["name"] for volume in spec["volumes"]}


def test_the_head_does_no_work_and_stays_and_spot_groups_fall_back():
    [resource, _] = render_parts()
    cluster = resource["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0" and cluster["authOptions"] == {"mode": "token"}
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert list(groups) == ["learners", "rollouts", "rollouts-fallback"]
    assert [groups[name].get("priority") for name in groups] == [None, 10, 1]
    assert (groups["learners"]["minReplicas"], groups["learners"]["maxReplicas"]) == (2, 2)
    assert (groups["rollouts"]["minReplicas"], groups["rollouts"]["maxReplicas"]) == (0, 8)
    assert groups["learners"]["replicas"] == 2 and "replicas" not in groups["rollouts"]  # it is the autoscaler's
    terms = {name: _terms(group["template"]) for name, group in groups.items()}
    assert len(terms["rollouts"]) == len(SPOT_LABELS)  # any cloud's mark will do
    for template in (
        cluster["headGroupSpec"]["template"],
        groups["learners"]["template"],
        groups["rollouts-fallback"]["template"],
    ):
        [term] = _terms(template)
        assert {expression["operator"] for expression in term["matchExpressions"]} == {"NotIn"}
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert all(group["template"]["spec"]["restartPolicy"] == "Never" for group in groups.values())


def test_the_autoscaler_reads_the_resources_of_a_group():
    """Ray's own parser, which takes whole numbers alone."""
    group = {"replicas": [0, 2], "cpus": 0.5, "resources": {"rollout": 2}}
    [resource, *_] = render_parts({"groups": {"rollouts": group}})
    [written] = resource["spec"]["workerGroupSpecs"]
    assert _get_custom_resources({}, written["rayStartParams"], "rollouts") == {"rollout": 2}
    with pytest.raises(
        MarlRayError, match=r"^config: groups\.rollouts\.resources\.rollout: expected a whole number, got 0\.5$"
    ):
        render_parts({"groups": {"rollouts": group | {"resources": {"rollout": 0.5}}}})


def test_the_pods_of_a_gateway_have_a_budget_keys_and_a_spool():
    service = SERVICE["service"] | {"api_keys_secret": "keys"}
    [resource, budget, _] = render_parts({"groups": {"gateway": {"replicas": 3}}, "service": service})
    assert budget["spec"]["minAvailable"] == 2 and budget["metadata"]["name"] == "train-gateway"
    [group] = resource["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    mounts = {mount["mountPath"]: mount["name"] for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["/etc/marl-ray"] == "api-keys" and mounts["/var/lib/marl-ray/spool"] == "spool"


def test_storage_is_a_claim_or_a_folder_of_every_machine():
    [resource, *_] = render_parts(
        {"volumes": [{"host": "/mnt/runs", "path": "/runs"}, {"claim": "data", "path": "/data"}]}
    )
    volumes = {volume["name"]: volume for volume in resource["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert volumes["storage"]["hostPath"] == {"path": "/mnt/runs", "type": "Directory"}
    assert volumes["storage-1"]["persistentVolumeClaim"] == {"claimName": "data"}


def _terms(template: dict[str, Any]) -> list[dict[str, Any]]:
    required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms: list[dict[str, Any]] = required["nodeSelectorTerms"]
    return terms


def test_a_fixed_cluster_has_no_autoscaler():
    [resource, *_] = render_parts({"groups": {"workers": {"replicas": 1}}})
    assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & resource["spec"].keys()
    assert "restartPolicy" not in resource["spec"]["headGroupSpec"]["template"]["spec"]


WRONG = [
    ({"name": "Train"}, "name"),
    ({"groups": {}}, "groups"),
    ({"groups": {"a": {"replicas": [3, 2]}}}, "groups.a: replicas: expected least and most, got [3, 2]"),
    ({"groups": {"a": {"replicas": 2, "spot": True}}}, "groups.a: spot: expected replicas: [least, most]"),
    ({"groups": {"a": {"memory": "8 GB"}}}, "groups.a.memory"),
    ({"groups": {"a": {"gpu": 1}}}, "groups.a.gpu"),
    ({"groups": {"a": {"cpus": float("inf")}}}, "groups.a.cpus"),
    ({"groups": {"a": {"cpus": 1e-6}}}, "groups.a.cpus"),
    ({"groups": {"head": {}}}, "groups: expected another name than head"),
    ({"volumes": [{"claim": "a", "path": "/tmp/"}]}, "volumes: expected each path once"),
    ({"volumes": [{"claim": "a", "path": "/a"}, {"claim": "b", "path": "/a"}]}, "volumes: expected each path once"),
    ({"user": 0}, "user"),
    (JOB | SERVICE, "job, service: expected one of them at most"),
    ({"job": {"entrypoint": "x", "schedule": "daily"}}, "job: schedule: expected five fields of cron"),
    ({"job": {"entrypoint": "x", "schedule": "a b c d e"}}, "job: schedule: expected five fields of cron"),
    (SERVICE | {"queue": "q", "groups": {"a": {"replicas": [1, 2]}}}, "groups.a.replicas: expected one number"),
    ({"job": {"entrypoint": "x", "time_zone": "UTC"}}, "job: time_zone: expected beside schedule"),
    (
        {"job": {"entrypoint": "x", "schedule": "0 3 * * *", "time_zone": "Mars/Olympus"}},
        "job: time_zone: expected a name such as Europe/Berlin, got 'Mars/Olympus'",
    ),
    ({"job": {"entrypoint": "x", "keep_record_s": 9}}, "job: keep_record_s: expected beside schedule"),
    (
        {"job": {"entrypoint": "x", "schedule": "0 3 * * *", "keep_record_s": 9}},
        "job: keep_record_s: expected as long as keep_s",
    ),
    ({"volumes": [{"path": "/runs"}]}, "volumes.0: claim, host: expected one of them"),
    ({"volumes": [{"claim": "a", "host": "/a", "path": "/runs"}]}, "volumes.0: claim, host: expected one of them"),
    (
        {"files": "f", "service": {"serve": {}, "api_keys_secret": "k"}},
        "files, service.api_keys_secret: expected one of them",
    ),
    (
        {"groups": {"a": {"replicas": [0, 1], "spot": True}, "a-fallback": {}}},
        "groups: a-fallback is what the spot group a falls back to",
    ),
    # What a server takes, as it does not look into the templates of pods, and what then makes no pod
    ({"image": ""}, "image: expected the name of an image"),
    ({"image": "{{ x }}:1"}, "image: expected the name of an image"),
    ({"ray_version": "2.x"}, "ray_version: expected a version, such"),
    ({"groups": {"a": {"memory": "0"}}}, "groups.a.memory: expected an amount above 0"),
    ({"groups": {"a": {"shm": "0.0Gi"}}}, "groups.a.shm: expected an amount above 0"),
    (SERVICE | {"service": {"serve": {}, "spool_size": "00"}}, "service.spool_size: expected an amount above 0"),
    ({"env": {"A B": "1"}}, "env.A B"),
    ({"env": {"A=B": "1"}}, "env.A=B"),
    ({"env": {"": "1"}}, "env."),
    ({"env": {"1A": "1"}}, "env.1A"),
    ({"env": {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "600"}}, "env: expected drain_s instead of RAY_GRACEFUL"),
    ({"groups": {"a": {"resources": {"a'b": 1}}}}, "groups.a.resources.a'b"),
    ({"groups": {"a": {"resources": {"CPU": 1}}}}, "groups.a: resources: expected another name than CPU"),
    ({"redis": {"address": ""}}, "redis.address: expected an address such as redis://host:6379"),
    ({"redis": {"address": "redis://:secret@x:1"}}, "redis.address: expected an address such as redis://host:6379"),
    ({"volumes": [{"claim": "a", "path": "/a/../tmp"}]}, "volumes.0.path: expected an absolute path without . and .."),
    ({"volumes": [{"claim": "a", "path": "//a"}]}, "volumes.0.path: expected an absolute path"),
    ({"volumes": [{"claim": "a", "path": "/a\n"}]}, "volumes.0.path: expected an absolute path"),
    ({"job": {"entrypoint": " "}}, "job.entrypoint: expected a text that is not empty"),
    ({"name": "a" * 38, "job": {"entrypoint": "x", "schedule": "0 3 * * *"}}, "name: expected 37 characters at most"),
    # Numbers that a resource's fields of 32 bits do not hold
    ({"groups": {"a": {"replicas": 2**31}}}, "groups.a.replicas"),
    ({"groups": {"a": {"replicas": [0, 2**31]}}}, "groups.a.replicas"),
    ({"groups": {"a": {"replicas": [0, 1], "idle_timeout_s": 2**31}}}, "groups.a.idle_timeout_s"),
    ({"groups": {"a": {"gpus": 2**31}}}, "groups.a.gpus"),
    ({"groups": {"a": {"cpus": 1e30}}}, "groups.a.cpus"),
    ({"job": {"entrypoint": "x", "retries": 2**31}}, "job.retries"),
    ({"job": {"entrypoint": "x", "deadline_s": 2**31}}, "job.deadline_s"),
    ({"job": {"entrypoint": "x", "keep_failed_s": 2**31}}, "job.keep_failed_s"),
    ({"drain_s": 2**31}, "drain_s"),
    ({"user": 2**31}, "user"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_a_wrong_config_is_one_line_that_names_the_key(change, words):
    with pytest.raises(MarlRayError) as caught:
        render_parts(change)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_somebody_else_has_made_may_have_any_name_that_kubernetes_takes():
    names = {"claim": "1." + "c" * 90, "path": "/runs"}
    [resource, *_] = render_parts({"volumes": [names], "secrets": ["my.secret"], "pull_secrets": ["9"]})
    spec = resource["spec"]["headGroupSpec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "9"}]
    assert {"persistentVolumeClaim": {"claimName": names["claim"]}}.items() <= {
        key: value for volume in spec["volumes"] for key, value in volume.items()
    }.items()


def test_a_large_number_of_cpus_is_written_out():
    [resource, *_] = render_parts({"groups": {"a": {"cpus": 2_000_001}}})
    [group] = resource["spec"]["workerGroupSpecs"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "2000001"


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9]{0,20}", fullmatch=True),
        st.fixed_dictionaries(
            {"replicas": st.integers(1, 4) | st.tuples(st.integers(0, 3), st.integers(3, 9)).map(list)},
            optional={
                "gpus": st.integers(0, 8),
                "cpus": st.sampled_from([0.5, 1, 7.5]),
                "memory": st.sampled_from(["2Gi", "1.5Gi"]),
            },
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([{}, JOB, SERVICE]),
)
def test_any_config_renders_to_what_the_linter_takes(groups, parts):
    manifests = render_parts({"groups": groups}, parts)
    assert list(yaml.safe_load_all(to_yaml(manifests))) == manifests
    assert [finding for manifest in manifests for finding in lint_manifest(manifest, "x")] == []


def test_the_command_prints_manifests_of_the_shipped_config(tmp_path):
    shown = marl_ray("cluster", "render", ROOT / "cluster" / "configs" / "training.yaml", "job.retries=2")
    assert shown.returncode == 0 and shown.stderr == ""
    (tmp_path / "all.yaml").write_text(shown.stdout)
    [job, *_] = yaml.safe_load_all(shown.stdout)
    assert (job["kind"], job["spec"]["backoffLimit"]) == ("RayJob", 2)
    assert marl_ray("cluster", "lint", tmp_path / "all.yaml").returncode == 0


@pytest.mark.parametrize("parts", [SERVICE, {"job": {"entrypoint": "x", "schedule": "0 3 * * *"}}])
def test_a_run_is_submitted_to_no_gateway_and_by_no_clock(tmp_path, parts):
    with pytest.raises(
        MarlRayError, match=r"^--kuberay: expected the config of a cluster without service and job\.schedule$"
    ):
        submission.submit(cast(Connection, None), "train", tmp_path, (), parse_config(ClusterConfig, BASE | parts), "x")


@pytest.mark.parametrize("name", ["Train", "a" * 48, "a/b", "a\n"])
def test_a_run_of_a_name_that_the_operator_refuses_is_not_submitted(tmp_path, name):
    config = tmp_path / "run.yaml"
    config.write_text("{name: x, algorithm: ppo, env: {id: gymnasium.CartPole-v1}, storage: /runs}")
    with pytest.raises(MarlRayError, match=r"--submission-id .*expected a-z, 0-9 and -"):
        submission.submit(cast(Connection, None), "train", config, (), parse_config(ClusterConfig, BASE), name)
