"""The Helm chart, rendered by Helm's own engine: every manifest of the five value sets, and what must not change."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from kube.charts import (
    CHART,
    IMAGE,
    MINIMAL,
    RAY,
    VALUES,
    chart,
    documents,
    everywhere,
    helm_python,
    of_kind,
    pods,
    texts,
    values_of,
)
from kubernetes import client
from pydantic import ValidationError

from marl_ray.cluster.lint.documents import embedded_serve_config
from marl_ray.cluster.lint.linter import lint_manifest, replica_pods
from marl_ray.cluster.lint.schemas import schemas
from marl_ray.config import RunConfig, parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.serving.administration.lint import lint_serve_config
from marl_ray.serving.logs.metrics import GatewayMetrics

ROOT = CHART.parents[1]


def test_there_are_five_sets_of_values_and_together_they_hold_every_kind():
    assert set(VALUES) == {"laptop-kind", "cpu-cluster", "gpu-spot", "serving-only", "external"}
    kinds = {document["kind"] for name in VALUES for document in documents(values_of(name))}
    assert set(RAY) | {"Ingress", "NetworkPolicy", "PodDisruptionBudget", "PriorityClass", "ServiceMonitor"} <= kinds


@everywhere
def test_every_ray_manifest_is_valid_and_lint_clean(name):
    for document in of_kind(documents(values_of(name)), *RAY):
        at = document["metadata"]["name"]
        findings = lint_manifest(document, at) if document["kind"] in schemas()["kinds"] else []
        if document["kind"] == "RayCronJob":
            job = {**document, "kind": "RayJob", "spec": document["spec"]["jobTemplate"]}
            findings += lint_manifest(job, at)
        assert findings == []
        if (config := embedded_serve_config(document)) is not None:
            assert lint_serve_config(config, at, pods=replica_pods(document)) == []


@everywhere
def test_every_other_manifest_is_of_kubernetes_own_schema(name):
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
def test_the_configs_of_jobs_are_what_their_commands_read(name):
    maps = [document["data"] for document in of_kind(documents(values_of(name)), "ConfigMap")]
    configs = [yaml.safe_load(data["config.yaml"]) for data in maps if "config.yaml" in data]
    for config in configs:
        parse_config(SweepConfig if "space" in config else RunConfig, config, ["storage=s3://bucket/runs"])
    # One reads a file that is in the storage, and one has no jobs.
    assert bool(configs) == (name not in ("external", "serving-only"))


@everywhere
def test_rendering_twice_gives_the_same(name):
    """The secrets that the chart generates differ in their data alone."""

    def without_secrets() -> list[dict[str, Any]]:
        rendered = documents(values_of(name))
        for document in of_kind(rendered, "Secret"):
            document["data"] = sorted(document["data"])
        return rendered

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
def test_wrong_values_are_refused_with_a_line_that_names_them(values, line):
    wrong = {
        key: {**MINIMAL.get(key, {}), **value} if isinstance(value, dict) else value for key, value in values.items()
    }
    with pytest.raises(helm_python.HelmError) as refused:
        texts({**MINIMAL, **wrong})
    assert line in str(refused.value).strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["1lab", "my.lab"])
def test_a_release_of_a_name_that_services_cannot_have_is_refused(name):
    with pytest.raises(helm_python.HelmError, match=f"expected a name of a-z, 0-9 and -, a letter first.*{name}"):
        texts(IMAGE, name)


NAMED = {
    "existing", "existingSecret", "existingDatabaseSecret", "storageClassName", "className", "host", "tlsSecret", "queue",
    "priorityClass", "ingressNamespace", "monitoringNamespace", "pullSecrets", "envFromSecrets", "names", "serviceAccount",
}  # fmt: skip
"""Keys of values, or of what is around them, that name an object of somebody else's."""


def all_named(values: Any, word: str, inside: bool = False) -> Any:
    """The values with this word as the name of all that somebody else has made."""
    if isinstance(values, dict):
        keep = ("existing",) if "storageClassName" in values else ()  # else no claim would be made
        return {
            key: value if key in keep else all_named(value, word, inside or key in NAMED)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [all_named(value, word, inside) for value in values]
    return word if inside and isinstance(values, str) and values else values


def types(node: Any) -> Any:
    """The shape of a manifest, with the type of each value in its place."""
    if isinstance(node, dict):
        return {key: types(value) for key, value in node.items()}
    return [types(value) for value in node] if isinstance(node, list) else type(node)


@everywhere
@pytest.mark.parametrize("word", ["007", "1e3", "true", "null"])
def test_a_name_that_looks_like_a_number_stays_a_name(name, word):
    """A Secret may be named `007`, and a template that writes it bare would ask for another one, 7."""
    named_values = values_of(name) | {
        "kueue": {"queue": "word", "priorityClass": "word"},
        "serviceAccount": {"name": "word"},
    }
    named_values["image"] = named_values["image"] | {"pullSecrets": ["word"]}
    plain, odd = (
        documents(all_named(named_values, text), text if text.isalpha() else "demo") for text in ("abc", word)
    )
    assert sorted(map(str, map(types, odd))) == sorted(map(str, map(types, plain)))
    assert f"'{word}'" in str(odd)


def test_what_values_hold_reaches_the_shell_and_the_pods_as_it_is():
    override = "env.kwargs={task: 'it''s'; $HOME}"
    job = {"configFile": "x.yaml", "overrides": [override]}
    [job_resource] = of_kind(documents({**MINIMAL, "jobs": {"a": job}, "ray": {"env": {"on": "1"}}}), "RayJob")
    assert override in shlex.split(job_resource["spec"]["entrypoint"])
    assert "on" in {
        variable["name"] for variable in pods(job_resource["spec"]["rayClusterSpec"])[0]["spec"]["containers"][0]["env"]
    }


def test_the_schema_knows_every_default_and_every_default_is_in_the_values():
    schema, values = chart().schema, chart().values
    assert schema
    optional = {"global"}

    def same(part: dict[str, Any], defaults: dict[str, Any], at: str) -> None:
        part = schema["$defs"][part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part
        if "properties" not in part:
            return
        if "existing" not in at:
            assert defaults.keys() <= part["properties"].keys(), at
        if not at:
            assert part["properties"].keys() - optional == defaults.keys()
        for key, value in defaults.items():
            if isinstance(value, dict):
                same(part["properties"][key], value, f"{at}.{key}")

    same(schema, values, "")


def test_helm_lint_has_nothing_to_say():
    for name in VALUES:
        report = helm_python.lint(CHART, values_of(name), strict=True)
        assert report["errors"] == []
        assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


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
    docs = (ROOT / "docs" / "serving" / "watching.md").read_text(encoding="utf-8")
    gateway_metrics = {family.name for family in GatewayMetrics().registry.collect()}
    for path in (CHART / "dashboards").glob("*.json"):
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        expressions = [target["expr"] for panel in panels for target in panel["targets"]]
        for metric in set(re.findall(r"ray_[a-z_]+", " ".join(expressions))) - {"ray_io_cluster"}:
            name = re.sub(r"(_count|_bucket)?(_total)?$", "", metric.removeprefix("ray_"))
            assert metric in words or metric in docs or name in gateway_metrics, metric


def test_the_values_of_the_docs_are_values():
    text = (ROOT / "docs" / "clusters" / "helm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    values = [yaml.safe_load(block) for block in blocks if re.match(r"# .*my-values.yaml\n", block)]
    assert [sorted(part) for part in values] == [["groups", "image", "jobs", "s3", "storage"], ["services"]]
    rendered = documents(values[0] | values[1], "lab")
    assert [d["metadata"]["name"] for d in of_kind(rendered, "RayJob", "RayService")] == [
        "lab-marl-ray-gridworld",
        "lab-marl-ray-gateway",
    ]
    config = next(d for d in of_kind(rendered, "ConfigMap") if d["metadata"]["name"] == "lab-marl-ray-gridworld-config")
    parse_config(RunConfig, yaml.safe_load(config["data"]["config.yaml"]))
