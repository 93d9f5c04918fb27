"""KubeRay manifests are checked offline: each bad one here is a small change to the repository's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kube.ray_service import CLUSTER, DELETE, HEAD, HEAD_POD, SERVICE, WORKER_POD, WORKERS, change_manifest, variable
from processes.command_line import marl_ray

from marl_ray.cluster.lint.linter import lint_manifest

OPTIONS = "spec.upgradeStrategy.clusterUpgradeOptions"
OPEN = {"labels", "matchLabels", "rayStartParams", "requests", "limits", "annotations"}
INCREMENTAL = {"gatewayClassName": "istio", "stepSizePercent": 10, "intervalSeconds": 30}


def incremental(**options: Any) -> tuple[tuple[str, Any], ...]:
    strategy = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": INCREMENTAL | options}
    return (("spec.upgradeStrategy", strategy), (f"{CLUSTER}.enableInTreeAutoscaling", True))


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        # the schema
        (("spec.serveConfig", "x"), "spec.serveConfig: unknown key, did you mean 'serveConfigV2'?"),
        (("specs", {}), "specs: unknown key, did you mean 'spec'?"),
        (("metadata.label", {}), "metadata.label: unknown key, did you mean 'labels'?"),
        ((f"{WORKERS}.minReplica", 1), f"{WORKERS}.minReplica: unknown key, did you mean 'minReplicas'?"),
        ((f"{WORKERS}.groupName", DELETE), f"{WORKERS}.groupName: missing key"),
        ((f"{WORKERS}.replicas", "3"), f"{WORKERS}.replicas: expected integer, got str"),
        (
            (f"{HEAD}.rayStartParams.num-cpus", 0),
            f"{HEAD}.rayStartParams.num-cpus: expected string, in quotes, got int",
        ),
        ((f"{CLUSTER}.rayVersion", 2.6), f"{CLUSTER}.rayVersion: expected string, in quotes, got float"),
        ((f"{CLUSTER}.authOptions.mode", "tokn"), f"{CLUSTER}.authOptions.mode: expected one of disabled, token"),
        (
            (f"{HEAD_POD}.containers.0.resources.limits.cpu", "two"),
            "resources.limits.cpu: expected a number or a quantity",
        ),
        (
            ("spec.rayClusterDeletionDelaySeconds", -1),
            "spec.rayClusterDeletionDelaySeconds: expected minimum 0, got -1",
        ),
        ((f"{WORKER_POD}.containers.0.resource", {}), "resource: unknown key, did you mean 'resources'?"),
        (("spec", DELETE), "spec: missing key"),
        # the kind
        (("apiVersion", "ray.io/v1alpha1"), "apiVersion: expected ray.io/v1, got 'ray.io/v1alpha1'"),
        (("kind", "RayServce"), "kind: expected one of RayCluster, RayJob, RayService, RayCronJob, got 'RayServce'"),
        # the operator's own rules
        (("metadata.name", "Gateway"), "metadata.name: expected a-z, 0-9 and -"),
        (("metadata.name", "g" * 48), "metadata.name: expected a-z, 0-9 and -, a letter first, 47 characters at most"),
        (
            ("metadata.annotations", {"ray.io/initializing-timeout": "soon"}),
            "initializing-timeout: expected a duration",
        ),
        (("spec.managedBy", "me"), "spec.managedBy: expected one of ray.io/kuberay-operator"),
        (("spec.upgradeStrategy.type", "Recreate"), "spec.upgradeStrategy.type: expected one of NewCluster"),
        (
            (f"{CLUSTER}.upgradeStrategy", {"type": "None"}),
            f"{CLUSTER}.upgradeStrategy.type: expected none: it is for a RayCluster that stands alone",
        ),
        ((f"{HEAD}.headService.metadata.name", "x"), f"{HEAD}.headService.metadata.name: expected none"),
        ((f"{HEAD_POD}.containers", []), f"{HEAD_POD}.containers: expected at least one"),
        ((f"{HEAD}.resources", {"CPU": "0"}), f"{HEAD}.resources: expected none beside rayStartParams.num-cpus"),
        ((f"{WORKERS}.rayStartParams.labels", "a=b"), f"{WORKERS}.rayStartParams.labels: expected {WORKERS}.labels"),
        ((f"{WORKERS}.labels", {"a b": "c"}), f"{WORKERS}.labels.a b: expected a label of Kubernetes"),
        ((f"{WORKERS}.minReplicas", 4), f"{WORKERS}.minReplicas: expected 0 to maxReplicas (3), got 4"),
        (
            (f"{WORKERS}.idleTimeoutSeconds", 60),
            f"{WORKERS}.idleTimeoutSeconds: expected autoscalerOptions.version: v2",
        ),
        ((f"{WORKERS}.idleTimeoutSeconds", 0), f"{WORKERS}.idleTimeoutSeconds: expected autoscalerOptions.version: v2"),
        ((f"{WORKERS}.priority", 0), None),
        ((f"{CLUSTER}.managedBy", "me"), f"{CLUSTER}.managedBy: expected one of ray.io/kuberay-operator"),
        ((f"{CLUSTER}.rayVersion", "v2.60.0"), None),
        ((f"{WORKERS}.priority", 1), f"{WORKERS}.priority: expected autoscalerOptions.version: v2"),
        (
            (f"{CLUSTER}.autoscalerOptions.idleTimeoutSeconds", -1),
            "autoscalerOptions.idleTimeoutSeconds: expected 0 or",
        ),
        (variable(HEAD_POD, "RAY_enable_autoscaler_v2", "1"), "v2: expected enableInTreeAutoscaling: true beside it"),
        (variable(HEAD_POD, "RAY_REDIS_ADDRESS", "r:1"), "expected gcsFaultToleranceOptions.redisAddress instead"),
        (variable(HEAD_POD, "REDIS_USERNAME", "x"), "expected gcsFaultToleranceOptions.redisUsername instead"),
        ((f"{HEAD}.rayStartParams.redis-password", "x"), "expected gcsFaultToleranceOptions.redisPassword instead"),
        (("metadata.annotations", {"ray.io/ft-enabled": "true"}), "expected none beside gcsFaultToleranceOptions"),
        ((f"{CLUSTER}.gcsFaultToleranceOptions.storage", {"size": "1Gi"}), "storage: expected none with Redis"),
        ((f"{CLUSTER}.rayVersion", "2.51.0"), f"{CLUSTER}.rayVersion: expected 2.52.0 or later for authOptions"),
        ((f"{CLUSTER}.rayVersion", DELETE), f"{CLUSTER}.rayVersion: expected 2.52.0 or later for authOptions"),
        ((f"{CLUSTER}.authOptions.enableK8sTokenAuth", True), "enableK8sTokenAuth: expected none: only a RayCluster"),
        # what runs, but not well
        (
            (f"{CLUSTER}.networkPolicy", {"mode": "DenyAll"}),
            f"{CLUSTER}.networkPolicy: expected none, unless the operator has the feature gate RayClusterNetworkPolicy",
        ),
        (
            (f"{CLUSTER}.gcsFaultToleranceOptions", {"backend": "rocksdb"}),
            f"{CLUSTER}.gcsFaultToleranceOptions.backend: expected redis, unless the operator has the feature gate",
        ),
        ((f"{HEAD}.rayStartParams", {}), f'{HEAD}.rayStartParams.num-cpus: expected "0"'),
        ((f"{WORKER_POD}.terminationGracePeriodSeconds", 60), "terminationGracePeriodSeconds: expected more than 60"),
        ((f"{WORKER_POD}.terminationGracePeriodSeconds", DELETE), "expected more than 60, the seconds that Ray drains"),
        ((f"{WORKER_POD}.containers.0.env", []), None),
        (
            (f"{WORKER_POD}.containers.0.image", "marl-ray"),
            f"{WORKER_POD}.containers.0.image: expected an image with a tag",
        ),
        ((f"{HEAD_POD}.containers.0.image", "r:5000/x:latest"), "containers.0.image: expected an image with a tag"),
        ((f"{HEAD_POD}.containers.0.image", "r:5000/x@sha256:" + "0" * 64), None),
        ((f"{CLUSTER}.autoscalerOptions.image", "x:latest"), f"{CLUSTER}.autoscalerOptions.image: expected an image"),
        ((f"{WORKER_POD}.volumes", []), "volumeMounts.0.name: expected one of the pod's volumes, got 'api-keys'"),
        (variable(WORKER_POD, "PGPASSWORD", "hunter2"), "value: expected valueFrom.secretKeyRef for PGPASSWORD"),
        (
            variable(WORKER_POD, "AWS_SECRET_ACCESS_KEY", "x"),
            "expected valueFrom.secretKeyRef for AWS_SECRET_ACCESS_KEY",
        ),
        (variable(HEAD_POD, "DB", "postgresql://u:pw@db/x"), "value: expected no password in the URL of DB"),
        (variable(HEAD_POD, "DB", "postgresql://u:hunter2$@db/x"), "value: expected no password in the URL of DB"),
        (variable(HEAD_POD, "DB", "postgresql://db/x?password=$hunter2"), "expected no password in the URL of DB"),
        (variable(HEAD_POD, "DB", "postgresql://u:$(PGPASSWORD)@db/x"), None),
        (variable(HEAD_POD, "AWS_WEB_IDENTITY_TOKEN_FILE", "/var/token"), None),
        (
            (f"{CLUSTER}.gcsFaultToleranceOptions.redisPassword", {"value": "hunter2"}),
            f"{CLUSTER}.gcsFaultToleranceOptions.redisPassword.value: expected valueFrom.secretKeyRef",
        ),
        (("spec.serveConfigV2", "a: [1"), "spec.serveConfigV2: not valid YAML at line 1"),
        (("spec.serveConfigV2", "a: 1\na: 2"), "spec.serveConfigV2: not valid YAML at line 2: key 'a' is given twice"),
        (("spec.serveConfigV2", ""), "spec.serveConfigV2: expected one Serve config, got 0"),
    ],
)
def test_a_mistake_is_one_line_with_its_path(change, finding):
    findings = [line.replace(": advice: ", ": ") for line in lint_manifest(change_manifest(change), "f.yaml")]
    # A pod's volumes are missed by each of its mounts.
    assert len({line.rpartition(": ")[2].split(", got")[0] for line in findings}) == (finding is not None)
    for mistake in findings:
        assert mistake.startswith("f.yaml: ")
        assert "\n" not in mistake
        assert "hunter2" not in mistake
    assert finding is None or finding in findings[0]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (incremental(), None),
        (
            incremental(stepSizePercent=40, maxSurgePercent=30),
            f"{OPTIONS}.stepSizePercent: expected 0 to maxSurgePercent",
        ),
        (incremental(maxSurgePercent=101), f"{OPTIONS}.maxSurgePercent: expected 0 to 100, got 101"),
        (incremental(intervalSeconds=0), f"{OPTIONS}.intervalSeconds: expected more than 0"),
        (incremental(gatewayClassName=""), f"{OPTIONS}.gatewayClassName: expected a class of the Gateway API"),
        (incremental()[:1], f"{CLUSTER}.enableInTreeAutoscaling: expected true"),
        (
            (*incremental()[1:], (f"{WORKER_POD}.restartPolicy", "Always")),
            f"{WORKER_POD}.restartPolicy: expected Never",
        ),
        ((*incremental()[1:], (f"{WORKERS}.suspend", True)), f"{WORKERS}.suspend: expected none with enableInTree"),
        (
            (
                *incremental()[1:],
                (f"{CLUSTER}.autoscalerOptions.version", "v2"),
                variable(HEAD_POD, "RAY_enable_autoscaler_v2", "1"),
            ),
            "RAY_enable_autoscaler_v2: expected none beside autoscalerOptions.version",
        ),
    ],
)
def test_keys_that_need_each_other_are_checked_together(changes, finding):
    findings = lint_manifest(change_manifest(*changes), "f.yaml")
    assert len(findings) == (finding is not None)
    assert finding is None or finding in findings[0]


@pytest.mark.parametrize(
    ("policy", "finding"),
    [
        (
            {"mode": "DenyAllIngress", "head": {"egressRules": [{}]}},
            f"{CLUSTER}.networkPolicy.head.egressRules: expected none with mode DenyAllIngress",
        ),
        (
            {"workerGroups": [{"groupName": "x"}]},
            f"{CLUSTER}.networkPolicy.workerGroups.0.groupName: expected one of gateway, got 'x'",
        ),
    ],
)
def test_rules_of_a_network_policy_are_for_what_it_denies(policy, finding):
    findings = lint_manifest(change_manifest((f"{CLUSTER}.networkPolicy", policy)), "f.yaml")
    assert [line for line in findings if ": advice: " not in line] == [f"f.yaml: {finding}"]


def test_a_network_policy_needs_groups_whose_names_may_be_part_of_its_own():
    group = (f"{WORKERS}.groupName", "Big_One")
    assert lint_manifest(change_manifest(group), "f.yaml") == []
    findings = lint_manifest(change_manifest(group, (f"{CLUSTER}.networkPolicy", {"mode": "DenyAll"})), "f.yaml")
    assert findings[0] == f"f.yaml: {WORKERS}.groupName: expected a-z, 0-9 and - beside networkPolicy, got 'Big_One'"


def closed_mappings(node: Any, path: str = "") -> Iterator[str]:
    """Paths of all mappings whose keys the schema knows, each with a dot at its end."""
    if isinstance(node, dict):
        yield path
        for key, part in node.items():
            if key not in OPEN:
                yield from closed_mappings(part, f"{path}{key}.")
    elif isinstance(node, list):
        for k, part in enumerate(node):
            yield from closed_mappings(part, f"{path}{k}.")


def test_an_unknown_key_is_found_in_every_part():
    paths = list(closed_mappings(SERVICE))
    assert len(paths) > 50
    for path in paths:
        assert lint_manifest(change_manifest((f"{path}bogusKey", 1)), "f.yaml") == [
            f"f.yaml: {path}bogusKey: unknown key"
        ]


def test_all_mistakes_are_told_at_once():
    bad = change_manifest(
        ("spec.bogus", 1), (f"{HEAD}.rayStartParams", {}), ("metadata.name", "X"), (f"{WORKERS}.bogus", 1)
    )
    assert len(lint_manifest(bad, "f.yaml")) == 4


@pytest.mark.parametrize(("kind", "key"), [("RayCluster", None), ("RayJob", "rayClusterSpec")])
def test_other_kinds_with_a_ray_cluster_are_checked_too(kind, key):
    cluster = SERVICE["spec"]["rayClusterConfig"]
    spec = {key: cluster, "entrypoint": "python x.py"} if key else cluster
    document = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    assert lint_manifest(document, "f.yaml") == []
    at = f"spec.{key}." if key else "spec."
    bad = change_manifest((f"{at}headGroupSpec.rayStartParams", {}), (f"{at}bogus", 1), document=document)
    assert [line.split(": ")[1] for line in lint_manifest(bad, "f.yaml")] == [
        f"{at}bogus",
        f"{at}headGroupSpec.rayStartParams.num-cpus",
    ]


def test_a_secret_in_a_file_is_a_finding_and_other_kinds_are_left_alone():
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}, "data": {"password": "aHVudGVyMg=="}}
    (finding,) = lint_manifest(secret, "f.yaml")
    assert finding.startswith("f.yaml: kind: expected no Secret with its data in a file")
    assert lint_manifest({"apiVersion": "v1", "kind": "ConfigMap", "anything": 1}, "f.yaml") == []
    assert lint_manifest([], "f.yaml") == ["f.yaml: expected a mapping of keys at the top, got list"]
    assert lint_manifest(None, "f.yaml") == ["f.yaml: expected a mapping of keys at the top, got nothing"]


def test_what_runs_badly_is_advice_and_fails_only_strict_checks(tmp_path):
    for change, kind in (
        ((f"{HEAD_POD}.containers.0.image", "x:latest"), "advice"),
        (("spec.serveConfigV2", ""), "error"),
    ):
        path = tmp_path / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(change_manifest(change)))
        runs = [marl_ray("lint", path), marl_ray("lint", path, "--strict")]
        assert [run.returncode for run in runs] == ([0, 2] if kind == "advice" else [2, 2])
        assert (": advice: " in runs[0].stdout) == (kind == "advice")
        assert runs[0].stdout.endswith("\n1 file, 1 piece of advice\n") == (kind == "advice")
