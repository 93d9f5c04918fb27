"""The Helm chart, rendered by Helm's own engine: every manifest of the five value sets, and what must not change."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from kube.charts import CHART, VALUES, chart, documents, helm_python, pods, texts, values_of
from kubernetes import client
from pydantic import ValidationError
from ray._private.label_utils import parse_node_labels_string

from marl_ray.cluster.lint.documents import serve_config
from marl_ray.cluster.lint.linter import lint_manifest, replica_pods
from marl_ray.cluster.lint.schemas import schemas
from marl_ray.config import RunConfig, parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.serving.client.lint import lint_serve_config

ROOT = CHART.parents[1]
IMAGE = {"image": {"repository": "registry.example.com/marl-ray"}}
RAY = ("RayCluster", "RayJob", "RayService", "RayCronJob")
MINIMAL: dict[str, Any] = {**IMAGE, "storage": {"uri": "s3://bucket/runs"}}
everywhere = pytest.mark.parametrize("name", VALUES)


def of_kind(found: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in found if document["kind"] in kinds]


def ray_clusters(found: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Kind and specification of every Ray cluster in the manifests."""
    clusters = []
    for document in of_kind(found, *RAY):
        spec = document["spec"].get("jobTemplate", document["spec"])
        cluster = spec if document["kind"] == "RayCluster" else spec.get("rayClusterSpec", spec.get("rayClusterConfig"))
        if cluster:
            clusters.append((document["kind"], cluster))
    return clusters


def ray_pods(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Heads and workers, without the submitters of jobs."""
    return [
        pod
        for _, cluster in ray_clusters(found)
        for pod in (cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"]))
    ]


def test_there_are_five_sets_of_values_and_together_they_hold_every_kind():
    assert set(VALUES) == {"laptop-kind", "cpu-cluster", "gpu-spot", "serving-only", "external"}
    kinds = {document["kind"] for name in VALUES for document in documents(values_of(name))}
    assert set(RAY) | {"Ingress", "NetworkPolicy", "PodDisruptionBudget", "PriorityClass", "ServiceMonitor"} <= kinds


@everywhere
def test_every_ray_manifest_is_valid_and_lint_clean(name: str):
    for document in of_kind(documents(values_of(name)), *RAY):
        at = document["metadata"]["name"]
        findings = lint_manifest(document, at) if document["kind"] in schemas()["kinds"] else []
        if document["kind"] == "RayCronJob":
            job = {**document, "kind": "RayJob", "spec": document["spec"]["jobTemplate"]}
            findings += lint_manifest(job, at)
        assert findings == []
        if (config := serve_config(document)) is not None:
            assert lint_serve_config(config, at, pods=replica_pods(document)) == []


@everywhere
def test_every_other_manifest_is_of_kubernetes_own_schema(name: str):
    """The models of the official client refuse unknown keys and wrong types; a round trip shows what they would drop."""
    for document in documents(values_of(name)):
        if document["kind"] in RAY or "monitoring.coreos.com" in document["apiVersion"]:
            continue
        if document["kind"] != "Secret":  # generated ones have their data, which no file may
            assert lint_manifest(document, "chart") == []
        assert as_kubernetes_reads(document) == document


def as_kubernetes_reads(document: dict[str, Any]) -> dict[str, Any]:
    model = getattr(client, document["apiVersion"].split("/")[-1].capitalize() + document["kind"])
    return dict(model.model_validate(document).model_dump(by_alias=True, exclude_none=True, mode="json"))


def test_a_wrong_key_in_a_built_in_kind_is_found_by_the_check_above():
    service = next(d for d in documents(IMAGE) if d["kind"] == "Service")
    assert as_kubernetes_reads(service) == service
    service["spec"]["selektor"] = {}
    with pytest.raises(ValidationError, match="selektor"):
        as_kubernetes_reads(service)


@everywhere
def test_the_configs_of_jobs_are_what_their_commands_read(name: str):
    for document in of_kind(documents(values_of(name)), "ConfigMap"):
        if "config.yaml" in document["data"]:
            data = yaml.safe_load(document["data"]["config.yaml"])
            parse_config(SweepConfig if "space" in data else RunConfig, data, ["storage=s3://bucket/runs"])


@everywhere
def test_rendering_twice_gives_the_same(name: str):
    """But for the secrets that the chart generates, of which only the data differ."""

    def without_secrets() -> list[dict[str, Any]]:
        found = documents(values_of(name))
        for document in of_kind(found, "Secret"):
            document["data"] = sorted(document["data"])
        return found

    assert without_secrets() == without_secrets()
    if name == "external":
        assert not of_kind(documents(values_of(name)), "Secret")
        assert texts(values_of(name)) == texts(values_of(name))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"jbos": {}}, "at '': additional properties 'jbos' not allowed"),
        ({"jobs": {"a": {"confg": {}}}}, "at '/jobs/a': additional properties 'confg' not allowed"),
        ({"groups": {"learner": {"replica": 3}}}, "at '/groups/learner': additional properties 'replica' not allowed"),
        ({"services": {"g": {"ingres": {}}}}, "at '/services/g': additional properties 'ingres' not allowed"),
        ({"ray": {"drainSeconds": "60"}}, "at '/ray/drainSeconds': got string, want integer"),
        (
            {"groups": {"learner": {"spot": "often"}}},
            "at '/groups/learner/spot': value must be one of 'never', 'only', 'any'",
        ),
        ({"cronJobs": {"a": {}}}, "at '/cronJobs/a': missing property 'schedule'"),
        (
            {"redis": {"externalAddress": "redis://:secret@h:1"}},
            "at '/redis/externalAddress': 'redis://:secret@h:1' does not",
        ),
        ({"image": {"repository": ""}}, "image.repository: expected the image that you built with marl-ray in it"),
        ({"image": {"tag": "latest"}}, "image.tag: expected a tag that does not move"),
        ({"jobs": {"a": {}}}, "jobs.a: expected one of config, configFile and entrypoint"),
        (
            {"jobs": {"a": {"config": {"name": "x"}, "entrypoint": "x"}}},
            "jobs.a: expected one of config, configFile and",
        ),
        ({"jobs": {"a": {"configFile": "x"}}, "storage": {"uri": ""}}, "storage: expected uri or claim.enabled"),
        (
            {"jobs": {"a": {"entrypoint": "x", "onCluster": True}}},
            "jobs.a.onCluster: expected cluster.enabled beside it",
        ),
        ({"jobs": {"mlflow": {"entrypoint": "x"}}}, "jobs.mlflow: expected another name, this one is of the chart"),
        (
            {"jobs": {"a": {"entrypoint": "x"}}, "services": {"a": {}}},
            "services.a: expected another name, this one is of jobs",
        ),
        ({"jobs": {"a" * 40: {"entrypoint": "x"}}}, "expected a name of at most 47 characters with the release's"),
        (
            {"services": {"g": {"replicas": 3, "minAvailable": 3}}},
            "services.g.minAvailable: expected less than replicas (3)",
        ),
        (
            {"services": {"g": {"groups": {"gateway": {"replicas": 2}}}}},
            "services.g.groups.gateway.replicas: expected services.g.replicas instead",
        ),
        (
            {"storage": {"claim": {"enabled": True, "mountPath": "/tmp/"}}},
            "storage.claim.mountPath: expected another path than /tmp/",
        ),
        (
            {"kueue": {"queue": "q"}, "services": {"g": {"autoscaling": {"enabled": True}}}},
            "services.g.autoscaling.enabled: expected false, as Kueue takes no service that scales",
        ),
        # What a template would write into a manifest as it is
        ({"fullnameOverride": "A_B"}, "at '/fullnameOverride': 'A_B' does not match pattern"),
        ({"nameOverride": "a\nb"}, "at '/nameOverride'"),
        ({"image": {"repository": "x: y"}}, "at '/image/repository'"),
        ({"image": {"tag": "{{ .x }}"}}, "at '/image/tag'"),
        ({"image": {"pullSecrets": ["a\n"]}}, "at '/image/pullSecrets/0'"),
        ({"postgresql": {"image": ""}}, "at '/postgresql/image'"),
        ({"redis": {"externalAddress": "redis://h: 1"}}, "at '/redis/externalAddress'"),
        ({"mlflow": {"ingress": {"host": "a b"}}}, "at '/mlflow/ingress/host'"),
        ({"storage": {"claim": {"mountPath": "/runs/../tmp"}}}, "at '/storage/claim/mountPath'"),
        ({"ray": {"env": {"A B": "1"}}}, "'A B' does not match pattern"),
        # What makes no pod, or one without bounds
        ({"groups": {"learner": {"resources": {"memory": "0"}}}}, "at '/groups/learner/resources/memory'"),
        ({"groups": {"learner": {"resources": {"cpu": 0}}}}, "at '/groups/learner/resources/cpu'"),
        ({"groups": {"learner": {"replicas": 2**31}}}, "at '/groups/learner/replicas': maximum"),
        ({"jobs": {"a": {"entrypoint": "x", "keepFailedSeconds": 2**31}}}, "at '/jobs/a/keepFailedSeconds': maximum"),
        ({"services": {"g": {"ingress": {"enabled": True}}}}, "services.g.ingress: expected host and tlsSecret"),
        ({"postgresql": {"enabled": False}}, "mlflow.existingDatabaseSecret: expected the database of MLflow"),
        (
            {"postgresql": {"enabled": False}, "mlflow": {"enabled": False}, "services": {"g": {}}},
            "postgresql.existingSecret: expected the database of services.g",
        ),
    ],
)
def test_wrong_values_are_refused_with_a_line_that_names_them(values: dict[str, Any], line: str):
    given = {
        key: {**MINIMAL.get(key, {}), **value} if isinstance(value, dict) else value for key, value in values.items()
    }
    with pytest.raises(helm_python.HelmError) as refused:
        texts({**MINIMAL, **given})
    assert line in str(refused.value).strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["1lab", "my.lab"])
def test_a_release_of_a_name_that_services_cannot_have_is_refused(name: str):
    with pytest.raises(helm_python.HelmError, match=f"expected a name of a-z, 0-9 and -, a letter first.*{name}"):
        texts(IMAGE, name)


def test_what_values_hold_reaches_the_shell_and_the_pods_as_it_is():
    override = "env.kwargs={task: 'it''s'; $HOME}"
    job = {"configFile": "x.yaml", "overrides": [override]}
    [found] = of_kind(documents({**MINIMAL, "jobs": {"a": job}, "ray": {"env": {"on": "1"}}}), "RayJob")
    assert override in shlex.split(found["spec"]["entrypoint"])
    assert "on" in {one["name"] for one in pods(found["spec"]["rayClusterSpec"])[0]["spec"]["containers"][0]["env"]}


def test_the_schema_knows_every_default_and_every_default_is_in_the_values():
    schema, values = chart().schema, chart().values
    assert schema
    optional = {"global"}

    def same(part: dict[str, Any], given: dict[str, Any], at: str) -> None:
        part = schema["$defs"][part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part
        if "properties" not in part:
            return
        if "existing" not in at:
            assert given.keys() <= part["properties"].keys(), at
        if not at:
            assert part["properties"].keys() - optional == given.keys()
        for key, value in given.items():
            if isinstance(value, dict):
                same(part["properties"][key], value, f"{at}.{key}")

    same(schema, values, "")


def test_helm_lint_has_nothing_to_say():
    for name in VALUES:
        report = helm_python.lint(CHART, values_of(name), strict=True)
        assert report["errors"] == []
        assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


@everywhere
def test_every_pod_is_non_root_read_only_and_gets_what_it_asks_for(name: str):
    for document in documents(values_of(name)):
        for pod in pods(document):
            spec = pod["spec"]
            assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            mounted = {volume["name"] for volume in spec["volumes"]}
            for container in (*spec.get("initContainers", []), *spec["containers"]):
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["requests"] == container["resources"]["limits"]
                assert {mount["name"] for mount in container["volumeMounts"]} <= mounted
                assert not container["image"].endswith(":latest")
            if spec.get("automountServiceAccountToken", True):
                assert pod["metadata"]["labels"]["marl-ray/role"] == "head"  # of an autoscaler


@everywhere
def test_ray_pods_drain_before_they_are_killed_and_keep_objects_in_memory(name: str):
    for pod in ray_pods(documents(values_of(name))):
        container = pod["spec"]["containers"][0]
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        hook = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert pod["spec"]["terminationGracePeriodSeconds"] >= hook + drain + 10
        writable = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes[writable["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "emptyDir" in volumes[writable["/tmp"]] and variables["HOME"] == "/tmp"
        assert "livenessProbe" not in container and "readinessProbe" not in container  # KubeRay's ask Serve's proxy too


@everywhere
def test_heads_are_on_demand_without_work_and_clusters_ask_for_a_token(name: str):
    for kind, cluster in ray_clusters(documents(values_of(name))):
        head = cluster["headGroupSpec"]
        assert head["rayStartParams"] == {"num-cpus": "0"}
        assert cluster["authOptions"]["mode"] == "token"
        affinity = head["template"]["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert {e["operator"] for term in affinity["nodeSelectorTerms"] for e in term["matchExpressions"]} == {"NotIn"}
        assert ("gcsFaultToleranceOptions" in cluster) == (kind in ("RayCluster", "RayService"))


def test_learners_are_a_gang_on_demand_and_rollouts_prefer_spot_but_can_fall_back():
    found = documents(values_of("gpu-spot"))
    job = of_kind(found, "RayJob")[0]
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert groups["learner"]["minReplicas"] == groups["learner"]["maxReplicas"] == groups["learner"]["replicas"] == 4
    spot, fallback = groups["rollout"], groups["rollout-fallback"]
    assert spot["priority"] > fallback["priority"] and "priority" not in groups["learner"]
    assert spot["labels"] == {"marl-ray/role": "rollout", "ray.io/market-type": "spot"}
    # Number of replicas is the autoscaler's from the start on: an upgrade must not put it back.
    assert "replicas" not in spot and spot["minReplicas"] == 0 and spot["maxReplicas"] == 32
    terms = spot["template"]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert len(terms["nodeSelectorTerms"]) == 4  # any one of the clouds' labels
    assert all(e["operator"] == "In" for term in terms["nodeSelectorTerms"] for e in term["matchExpressions"])
    classes = {d["metadata"]["name"]: d for d in of_kind(found, "PriorityClass")}
    used = {name: groups[name]["template"]["spec"]["priorityClassName"] for name in groups}
    assert classes[used["learner"]]["value"] > classes[used["rollout"]]["value"]
    assert classes[used["rollout"]]["preemptionPolicy"] == "Never"
    # Kueue suspends what it has no room for, which KubeRay allows with this alone.
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert job["spec"]["shutdownAfterJobFinishes"] and "deletionStrategy" not in job["spec"]
    on_cluster = {"cluster": {"enabled": True}, "jobs": {"on": {"entrypoint": "x", "onCluster": True}}}
    [other] = of_kind(documents(values_of("gpu-spot") | on_cluster), "RayJob")
    assert not {key for key in other["metadata"]["labels"] if "kueue" in key}  # its cluster is what Kueue admits


@everywhere
def test_ray_accepts_the_labels_of_its_nodes(name: str):
    for _, cluster in ray_clusters(documents(values_of(name))):
        for group in cluster["workerGroupSpecs"]:  # KubeRay sorts and joins them so
            given = ",".join(f"{key}={value}" for key, value in sorted(group["labels"].items()))
            assert parse_node_labels_string(given) == group["labels"]


def test_without_an_autoscaler_there_are_no_groups_that_nothing_would_fill():
    job = of_kind(documents({**MINIMAL, "jobs": {"a": {"entrypoint": "x"}}}), "RayJob")[0]
    assert [group["groupName"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]] == ["learner"]


def test_a_job_ends_in_time_is_retried_from_its_storage_and_cleans_up_after_itself():
    job = of_kind(documents(values_of("laptop-kind")), "RayJob")[0]["spec"]
    assert job["entrypoint"] == "marl-ray train /etc/marl-ray/config.yaml storage=/var/lib/marl-ray/runs"
    assert job["backoffLimit"] == 1 and job["activeDeadlineSeconds"] and job["preRunningDeadlineSeconds"]
    rules = [(rule["policy"], *rule["condition"].values()) for rule in job["deletionStrategy"]["deletionRules"]]
    assert rules == [
        ("DeleteCluster", "SUCCEEDED", 300),
        ("DeleteWorkers", "Failed", 0),
        ("DeleteCluster", "Failed", 3600),
    ]
    for pod in (job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]):
        claims = [
            v["persistentVolumeClaim"] for v in pod["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v
        ]
        assert claims == [{"claimName": "demo-marl-ray-storage"}]


def test_a_cron_job_takes_its_old_jobs_away():
    cron = of_kind(documents(values_of("cpu-cluster")), "RayCronJob")[0]["spec"]
    assert (cron["schedule"], cron["timeZone"]) == ("30 1 * * *", "Europe/Berlin") and "suspend" not in cron
    rules = cron["jobTemplate"]["deletionStrategy"]["deletionRules"]
    ends = [rule["condition"] for rule in rules if rule["policy"] == "DeleteSelf"]
    assert ends == [
        {"jobStatus": "SUCCEEDED", "ttlSeconds": 604800},
        {"jobDeploymentStatus": "Failed", "ttlSeconds": 604800},
    ]


def test_what_a_cron_job_makes_is_named_after_its_ray_job_also_in_a_retry():
    cron = of_kind(documents(values_of("cpu-cluster")), "RayCronJob")[0]["spec"]
    entrypoint = cron["jobTemplate"]["entrypoint"].replace("marl-ray", "echo", 1)
    for attempt in ("demo-marl-ray-nightly-2941-x8jss", "demo-marl-ray-nightly-2941-abcde"):
        environment = os.environ | {"RAY_JOB_SUBMISSION_ID": attempt}
        said = subprocess.run(["bash", "-ce", entrypoint], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.split()[-1] == "name=demo-marl-ray-nightly-2941"


def test_words_of_an_entrypoint_are_quoted_for_the_shell():
    values = {**MINIMAL, "jobs": {"a": {"configFile": "a b.yaml", "overrides": ["env.kwargs={agents: 2}"]}}}
    job = of_kind(documents(values), "RayJob")[0]
    assert job["spec"]["entrypoint"] == "marl-ray train 'a b.yaml' 'env.kwargs={agents: 2}' storage=s3://bucket/runs"


def test_the_config_of_a_job_cannot_change_under_its_retries():
    maps = of_kind(documents(values_of("cpu-cluster")), "ConfigMap")
    immutable = {d["metadata"]["name"]: d.get("immutable", False) for d in maps if "config.yaml" in d["data"]}
    assert immutable == {"demo-marl-ray-gridworld-config": True, "demo-marl-ray-nightly-config": False}


def test_a_gateway_has_a_budget_spread_replicas_and_keys():
    found = documents(values_of("cpu-cluster"))
    service = of_kind(found, "RayService")[0]
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert (
        args["replicas"] == 3 and args["database"] == "postgresql://" and args["api_keys"] == "/etc/marl-ray/keys.yaml"
    )
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    labels = worker["template"]["metadata"]["labels"]
    budget = of_kind(found, "PodDisruptionBudget")[0]["spec"]
    assert budget["minAvailable"] == 2 and budget["selector"]["matchLabels"].items() <= labels.items()
    spread = worker["template"]["spec"]["topologySpreadConstraints"]
    assert {rule["topologyKey"] for rule in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > grace
    ingress = next(d for d in of_kind(found, "Ingress") if "gateway" in d["metadata"]["name"])
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": f"{service['metadata']['name']}-serve-svc", "port": {"number": 8000}}
    assert ingress["spec"]["tls"] == [{"hosts": ["gateway.example.com"], "secretName": "gateway-tls"}]


@everywhere
def test_network_policies_mean_pods_that_there_are_and_let_names_be_resolved(name: str):
    found = documents(values_of(name))
    labels = [pod["metadata"]["labels"] for document in found for pod in pods(document)]
    policies = of_kind(found, "NetworkPolicy")
    for policy in policies:
        chosen = policy["spec"]["podSelector"]["matchLabels"]
        assert any(chosen.items() <= one.items() for one in labels), policy["metadata"]["name"]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        egress = policy["spec"]["egress"]
        ports = {(port["port"], port["protocol"]) for rule in egress if "to" not in rule for port in rule["ports"]}
        assert not egress or {(53, "UDP"), (53, "TCP")} <= ports
    chosen = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    for pod in ray_pods(found):
        assert any(one.items() <= pod["metadata"]["labels"].items() for one in chosen)


def test_what_is_elsewhere_can_be_reached():
    policy = next(
        d for d in of_kind(documents(values_of("external")), "NetworkPolicy") if "gateway" in d["metadata"]["name"]
    )
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
    assert {53, 443, 9000, 6380, 5432} <= ports


def test_names_and_selectors_of_what_keeps_state_do_not_depend_on_values():
    """Kubernetes refuses to change them, and under other names the data would be gone."""

    def fixed(values: dict[str, Any]) -> list[Any]:
        kept = of_kind(documents(values), "StatefulSet", "PersistentVolumeClaim", "Deployment")
        return [
            (d["kind"], d["metadata"]["name"], d["spec"].get("selector"), d["spec"].get("serviceName")) for d in kept
        ]

    before = fixed(IMAGE)
    changed = {
        "image": {"repository": "elsewhere/marl-ray", "tag": "9.9.9"},
        "postgresql": {"claim": {"size": "99Gi"}, "image": "postgres:18.0", "resources": {"memory": "9Gi"}},
        "redis": {"claim": {"size": "9Gi"}},
        "mlflow": {"claim": {"size": "99Gi"}, "workers": 9},
        "services": {"gateway": {"gateway": {"experiments": []}}},
        "monitoring": {"podMonitor": True},
    }
    assert fixed(changed) == before
    assert len(before) == 6
    for document in of_kind(documents(IMAGE), "StatefulSet"):
        assert "volumeClaimTemplates" not in document["spec"]  # so a claim can be made larger


def test_claims_and_generated_secrets_outlive_the_release():
    kept = of_kind(documents(values_of("laptop-kind")), "PersistentVolumeClaim", "Secret")
    assert len(kept) == 9
    assert all(d["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for d in kept)


@everywhere
def test_no_secret_value_is_anywhere_but_in_a_secret(name: str):
    found = documents(values_of(name))
    secret = {
        v for d in of_kind(found, "Secret") for k, v in d["data"].items() if k in ("password", "tls.key", "admin-key")
    }
    others = json.dumps([d for d in found if d["kind"] != "Secret"])
    notes = texts(values_of(name))["templates/NOTES.txt"]
    assert not [value for value in secret if value in others or value in notes]


def test_the_notes_name_what_was_installed():
    notes = texts(values_of("cpu-cluster"))["templates/NOTES.txt"]
    for words in (
        "get rayjob demo-marl-ray-gridworld",
        "demo-marl-ray-gateway-serve-svc.lab:8000",
        "demo-marl-ray-mlflow",
    ):
        assert words in notes
    assert "Nothing of Ray runs yet" in texts(IMAGE)["templates/NOTES.txt"]


def test_dashboards_ask_for_metrics_that_there_are():
    known = Path(str(ray.__file__)).parent.glob("dashboard/modules/metrics/dashboards/*.py")
    words = set(re.findall(r"ray_[a-z_]+", " ".join(path.read_text() for path in known)))
    docs = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    source = (ROOT / "src/marl_ray/serving/logs/metrics.py").read_text(encoding="utf-8")
    ours = set(re.findall(r'"(marl_ray_gateway_\w+)"', source))
    ours |= {f"marl_ray_gateway_{gauge}" for gauge in re.findall(r'_gauge\(\s*"(\w+)"', source)}
    for path in (CHART / "dashboards").glob("*.json"):
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        expressions = [target["expr"] for panel in panels for target in panel["targets"]]
        for metric in set(re.findall(r"ray_[a-z_]+", " ".join(expressions))) - {"ray_io_cluster"}:
            name = re.sub(r"(_count|_bucket)?(_total)?$", "", metric.removeprefix("ray_"))
            assert metric in words or metric in docs or name in ours, metric


def test_the_values_of_the_docs_are_values():
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    blocks = re.findall(r"((?:^    .*\n)+)", text, re.MULTILINE)
    values = [yaml.safe_load(block) for block in blocks if re.match(r" *# .*my-values.yaml\n", block)]
    assert [sorted(part) for part in values] == [["groups", "image", "jobs", "s3", "storage"], ["services"]]
    found = documents(values[0] | values[1], "lab")
    assert [d["metadata"]["name"] for d in of_kind(found, "RayJob", "RayService")] == [
        "lab-marl-ray-gridworld",
        "lab-marl-ray-gateway",
    ]
    config = next(d for d in of_kind(found, "ConfigMap") if d["metadata"]["name"] == "lab-marl-ray-gridworld-config")
    parse_config(RunConfig, yaml.safe_load(config["data"]["config.yaml"]))
