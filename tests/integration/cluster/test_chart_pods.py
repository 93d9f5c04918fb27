"""The pods, jobs and policies that the Helm chart renders: what keeps them safe, and what keeps their work."""

import json
import os
import subprocess
from typing import Any

import yaml
from kube.charts import (
    IMAGE,
    MINIMAL,
    documents,
    everywhere,
    of_kind,
    pods,
    ray_clusters,
    ray_pods,
    texts,
    values_of,
)
from ray._private.label_utils import parse_node_labels_string


@everywhere
def test_every_pod_is_non_root_read_only_and_gets_what_it_asks_for(name):
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
def test_ray_pods_drain_before_they_are_killed_and_keep_objects_in_memory(name):
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
def test_heads_are_on_demand_without_work_and_clusters_ask_for_a_token(name):
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
    rendered = documents(values_of("gpu-spot"))
    job = of_kind(rendered, "RayJob")[0]
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
    classes = {d["metadata"]["name"]: d for d in of_kind(rendered, "PriorityClass")}
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
def test_ray_accepts_the_labels_of_its_nodes(name):
    for _, cluster in ray_clusters(documents(values_of(name))):
        for group in cluster["workerGroupSpecs"]:  # KubeRay sorts and joins them so
            labels = ",".join(f"{key}={value}" for key, value in sorted(group["labels"].items()))
            assert parse_node_labels_string(labels) == group["labels"]


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
        process = subprocess.run(
            ["bash", "-ce", entrypoint], env=environment, capture_output=True, text=True, check=True
        )
        assert process.stdout.split()[-1] == "name=demo-marl-ray-nightly-2941"


def test_words_of_an_entrypoint_are_quoted_for_the_shell():
    values = {**MINIMAL, "jobs": {"a": {"configFile": "a b.yaml", "overrides": ["env.kwargs={agents: 2}"]}}}
    job = of_kind(documents(values), "RayJob")[0]
    assert job["spec"]["entrypoint"] == "marl-ray train 'a b.yaml' 'env.kwargs={agents: 2}' storage=s3://bucket/runs"


def test_the_config_of_a_job_cannot_change_under_its_retries():
    maps = of_kind(documents(values_of("cpu-cluster")), "ConfigMap")
    immutable = {d["metadata"]["name"]: d.get("immutable", False) for d in maps if "config.yaml" in d["data"]}
    assert immutable == {"demo-marl-ray-gridworld-config": True, "demo-marl-ray-nightly-config": False}


def test_a_gateway_has_a_budget_spread_replicas_and_keys():
    rendered = documents(values_of("cpu-cluster"))
    service = of_kind(rendered, "RayService")[0]
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert (
        args["replicas"] == 3 and args["database"] == "postgresql://" and args["api_keys"] == "/etc/marl-ray/keys.yaml"
    )
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    labels = worker["template"]["metadata"]["labels"]
    budget = of_kind(rendered, "PodDisruptionBudget")[0]["spec"]
    assert budget["minAvailable"] == 2 and budget["selector"]["matchLabels"].items() <= labels.items()
    spread = worker["template"]["spec"]["topologySpreadConstraints"]
    assert {rule["topologyKey"] for rule in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > grace
    ingress = next(d for d in of_kind(rendered, "Ingress") if "gateway" in d["metadata"]["name"])
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": f"{service['metadata']['name']}-serve-svc", "port": {"number": 8000}}
    assert ingress["spec"]["tls"] == [{"hosts": ["gateway.example.com"], "secretName": "gateway-tls"}]


@everywhere
def test_network_policies_mean_pods_that_there_are_and_let_names_be_resolved(name):
    rendered = documents(values_of(name))
    labels = [pod["metadata"]["labels"] for document in rendered for pod in pods(document)]
    policies = of_kind(rendered, "NetworkPolicy")
    for policy in policies:
        chosen = policy["spec"]["podSelector"]["matchLabels"]
        assert any(chosen.items() <= label_set.items() for label_set in labels), policy["metadata"]["name"]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        egress = policy["spec"]["egress"]
        ports = {(port["port"], port["protocol"]) for rule in egress if "to" not in rule for port in rule["ports"]}
        assert not egress or {(53, "UDP"), (53, "TCP")} <= ports
    chosen = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    for pod in ray_pods(rendered):
        assert any(selector.items() <= pod["metadata"]["labels"].items() for selector in chosen)


def test_what_is_elsewhere_can_be_reached():
    policy = next(
        d for d in of_kind(documents(values_of("external")), "NetworkPolicy") if "gateway" in d["metadata"]["name"]
    )
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
    assert {53, 443, 9000, 6380, 5432} <= ports


def test_names_and_selectors_of_what_keeps_state_do_not_depend_on_values():
    """Kubernetes refuses to change them, and under other names the data would be gone."""

    def fixed(values: dict[str, Any]) -> list[Any]:
        stateful = of_kind(documents(values), "StatefulSet", "PersistentVolumeClaim", "Deployment")
        return [
            (d["kind"], d["metadata"]["name"], d["spec"].get("selector"), d["spec"].get("serviceName"))
            for d in stateful
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
    lasting = of_kind(documents(values_of("laptop-kind")), "PersistentVolumeClaim", "Secret")
    assert len(lasting) == 9
    assert all(d["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for d in lasting)


@everywhere
def test_no_secret_value_is_anywhere_but_in_a_secret(name):
    rendered = documents(values_of(name))
    secret = {
        v
        for d in of_kind(rendered, "Secret")
        for k, v in d["data"].items()
        if k in ("password", "tls.key", "admin-key")
    }
    others = json.dumps([d for d in rendered if d["kind"] != "Secret"])
    notes = texts(values_of(name))["templates/NOTES.txt"]
    assert not [value for value in secret if value in others or value in notes]
