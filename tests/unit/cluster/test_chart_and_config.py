"""The chart and the short config of a cluster say the same: rendered both ways, KubeRay's resources differ where listed."""

from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import pytest
from kube.charts import documents

from marl_ray.cluster.kuberay.manifests.rendering import render
from marl_ray.config import parse_config
from marl_ray.config.cluster import ClusterConfig

RELEASE = "demo-marl-ray"
IMAGE = "registry.example.com/marl-ray:0.1.0"
VALUES: dict[str, Any] = {
    "image": {"repository": "registry.example.com/marl-ray", "tag": "0.1.0"},
    "storage": {"claim": {"enabled": True, "existing": "runs", "mountPath": "/runs"}},
    "mlflow": {"enabled": False},
    "groups": {"learner": {"replicas": 2, "resources": {"gpu": 1}}},
}
CONFIG: dict[str, Any] = {
    "image": IMAGE,
    "service_account": RELEASE,
    "volumes": [{"claim": "runs", "path": "/runs"}],
    "groups": {"learner": {"replicas": 2, "cpus": 4, "memory": "16Gi", "gpus": 1}},
}
SCALES = {"rollout": {"replicas": [0, 8], "cpus": 4, "memory": "8Gi", "spot": True}}
SERVE = {"proxy_location": "EveryNode", "applications": []}
REDIS = {"redis": {"address": f"redis://{RELEASE}-redis:6379", "password_secret": f"{RELEASE}-redis"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RayCluster": ({"cluster": {"enabled": True}}, {**REDIS}),
    "RayCluster with an autoscaler": (
        {"cluster": {"enabled": True, "autoscaling": {"enabled": True}}},
        {**REDIS, "groups": CONFIG["groups"] | SCALES},
    ),
    "RayJob": ({"jobs": {"a": {"entrypoint": "x"}}}, {"job": {"entrypoint": "x"}}),
    "RayJob with an autoscaler": (
        {"jobs": {"a": {"entrypoint": "x", "autoscaling": {"enabled": True}}}},
        {"job": {"entrypoint": "x"}, "groups": CONFIG["groups"] | SCALES},
    ),
    "RayJob in a queue": (
        {"jobs": {"a": {"entrypoint": "x"}}, "kueue": {"queue": "gpu"}},
        {"job": {"entrypoint": "x"}, "queue": "gpu"},
    ),
    "RayJob in a queue with an autoscaler": (
        {"jobs": {"a": {"entrypoint": "x", "autoscaling": {"enabled": True}}}, "kueue": {"queue": "gpu"}},
        {"job": {"entrypoint": "x"}, "groups": CONFIG["groups"] | SCALES, "queue": "gpu"},
    ),
    "RayCronJob": (
        {"cronJobs": {"a": {"entrypoint": "x", "schedule": "0 3 * * *", "timeZone": "Europe/Rome"}}},
        {"job": {"entrypoint": "x", "schedule": "0 3 * * *", "time_zone": "Europe/Rome"}},
    ),
    "RayService": (
        {"services": {"a": {}}},
        {
            **REDIS,
            "service": {"serve": SERVE, "api_keys_secret": f"{RELEASE}-a-api-keys"},
            "groups": {"gateway": {"replicas": 3, "cpus": 2, "memory": "4Gi"}},
        },
    ),
}
"""Values of the chart, and keys of a config that mean the same."""

DIFFERENT = {
    "marl-ray/*": "labels of our own: a release holds several clusters whose groups have roles; a config is one cluster",
    "priorityClassName": "the chart makes classes, which are of the whole cluster and so no matter of one config",
    "imagePullPolicy": "the chart has a key for it; Kubernetes' own default for an image with a tag is the same",
    "serveConfigV2": "the chart writes it from the gateway's config; a config has it as `serve deploy` takes it",
    "PG*": "the chart knows its database; a config names Secrets whose keys become variables",
}
"""Fields and variables that may differ, and why."""


def _comparable(part: Any) -> Any:
    """A manifest without what may differ, and with lists of named things by name, as their order means nothing."""
    if isinstance(part, list) and all(isinstance(item, dict) and "name" in item for item in part):
        part = {item["name"]: item for item in part}
    if isinstance(part, dict):
        parts = {key: _comparable(value) for key, value in part.items()}
        return {key: parts[key] for key in parts if not any(fnmatch(key, pattern) for pattern in DIFFERENT)}
    return [_comparable(item) for item in part] if isinstance(part, list) else part


def _differences(chart: Any, config: Any, path: str = "") -> list[str]:
    if isinstance(chart, dict) and isinstance(config, dict):
        keys = [*chart, *(key for key in config if key not in chart)]
        return [
            line for key in keys for line in _differences(chart.get(key), config.get(key), f"{path}.{key}".lstrip("."))
        ]
    if isinstance(chart, list) and isinstance(config, list) and len(chart) == len(config):
        return [
            line
            for k, pair in enumerate(zip(chart, config, strict=True))
            for line in _differences(*pair, f"{path}.{k}")
        ]
    return [] if chart == config else [f"{path}: the chart has {chart!r}, a config {config!r}"]


@pytest.mark.parametrize("case", CASES)
def test_the_chart_and_a_config_render_the_same(case):
    values, config = CASES[case]
    kind = case.split(maxsplit=1)[0]
    [of_chart] = [document for document in documents(VALUES | values) if document["kind"] == kind]
    of_config = render(parse_config(ClusterConfig, CONFIG | {"name": of_chart["metadata"]["name"]} | config))[0]
    assert of_config["kind"] == kind
    assert _differences(_comparable(of_chart["spec"]), _comparable(of_config["spec"])) == []
    queue = {key: value for key, value in of_chart["metadata"]["labels"].items() if "kueue" in key}
    assert queue.items() <= of_config["metadata"]["labels"].items()
    elastic = of_chart["metadata"].get("annotations", {})
    assert elastic == of_config["metadata"].get("annotations", {})
    assert bool(elastic) == (case == "RayJob in a queue with an autoscaler")


def test_any_other_difference_is_seen():
    [of_chart] = [document for document in documents(VALUES | CASES["RayJob"][0]) if document["kind"] == "RayJob"]
    changed = deepcopy(of_chart)
    head = changed["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["terminationGracePeriodSeconds"] = 1
    head["containers"][0]["env"].append({"name": "NEW", "value": "1"})
    differences = _differences(_comparable(of_chart), _comparable(changed))
    assert {line.split(":")[0].rpartition(".")[2] for line in differences} == {"NEW", "terminationGracePeriodSeconds"}
