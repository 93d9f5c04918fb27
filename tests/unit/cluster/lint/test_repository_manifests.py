"""The manifests of the repository: without a finding, and like those that are rendered."""

from typing import Any

from kube.ray_service import DOCUMENTS, HEAD, SERVICE, WORKERS, change_manifest

from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.cluster.lint.documents import embedded_serve_config, is_manifest
from marl_ray.cluster.lint.linter import lint_manifest, replica_pods
from marl_ray.config.cluster import ClusterConfig
from marl_ray.config.load import parse_config


def test_the_manifests_in_the_repository_are_good():
    assert [document["kind"] for document in DOCUMENTS] == ["RayService", "PodDisruptionBudget", "NetworkPolicy"]
    for document in DOCUMENTS:
        assert is_manifest(document)
        assert lint_manifest(document, "f.yaml") == []
    assert replica_pods(SERVICE) == 3


def test_the_budget_and_the_policy_mean_the_pods_that_there_are():
    labels = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
    head = SERVICE["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
    _, budget, policy = DOCUMENTS
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert not budget["spec"]["selector"]["matchLabels"].items() <= head.items()
    assert budget["spec"]["minAvailable"] < replica_pods(SERVICE)
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items() & head.items()


def test_the_pods_written_by_hand_are_like_those_that_are_rendered():
    """The same confinement, drain, memory and metrics; secrets and sizes are its own."""
    config = {"name": "g", "image": "a/b:1", "groups": {"gateway": {"replicas": 3}}}
    service = {"serve": {"applications": []}, "api_keys_secret": "marl-ray-api-keys"}
    [rendered, *_] = render(parse_config(ClusterConfig, config | {"service": service}))
    for pod, other in zip(pods(SERVICE), pods(rendered), strict=True):
        assert pod["metadata"]["annotations"] == other["metadata"]["annotations"]
        (container,), (expected,) = pod["spec"]["containers"], other["spec"]["containers"]
        for key in ("securityContext", "lifecycle", "ports"):
            assert container[key] == expected[key], key
        for key in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken"):
            assert pod["spec"][key] == other["spec"][key], key
        assert sorted(map(str, pod["spec"]["volumes"])) == sorted(map(str, other["spec"]["volumes"]))
        assert sorted(map(str, container["volumeMounts"])) == sorted(map(str, expected["volumeMounts"]))
        training = "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"
        assert all(entry in container["env"] for entry in expected["env"] if entry["name"] != training)


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def test_a_head_with_cpus_may_run_replicas():
    assert replica_pods(change_manifest((f"{HEAD}.rayStartParams", {}), (f"{WORKERS}.maxReplicas", 5))) == 6


def test_the_serve_config_inside_is_plain_data():
    assert embedded_serve_config(SERVICE)["applications"][0]["args"]["replicas"] == 3
    assert embedded_serve_config(change_manifest(("spec.serveConfigV2", "a: ["))) is None
    assert embedded_serve_config(DOCUMENTS[1]) is None
