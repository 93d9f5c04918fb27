"""The chart as Helm's own engine renders it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm_python = pytest.importorskip("helm_python", reason="Helm's engine is on PyPI for x86_64 alone")

CHART = Path(__file__).parents[3] / "helm" / "marl-ray"
VALUES = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
IMAGE = {"image": {"repository": "registry.example.com/marl-ray"}}
MINIMAL: dict[str, Any] = {**IMAGE, "storage": {"uri": "s3://bucket/runs"}}
RAY = ("RayCluster", "RayJob", "RayService", "RayCronJob")
everywhere = pytest.mark.parametrize("name", VALUES)


def values_of(name: str) -> dict[str, Any]:
    """One of the chart's own sets of values."""
    return dict(yaml.safe_load(VALUES[name].read_text(encoding="utf-8")))


@cache
def chart() -> Any:
    return helm_python.Chart.load(CHART)


def texts(values: dict[str, Any], name: str = "demo", **options: Any) -> dict[str, str]:
    """Template -> what it renders to, empty ones left out. Raises `helm_python.HelmError`."""
    rendered = chart().render(values, name=name, namespace="lab", **options)
    return {template.removeprefix("marl-ray/"): text for template, text in rendered.items() if text.strip()}


def documents(values: dict[str, Any], name: str = "demo", **options: Any) -> list[dict[str, Any]]:
    """All manifests, in the order of their templates."""
    return [
        document
        for template, text in sorted(texts(values, name, **options).items())
        if template.endswith(".yaml")
        for document in yaml.load_all(text, yaml.CSafeLoader)
        if document
    ]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates anywhere inside a manifest, or the manifest itself if it is a pod."""
    if document.get("kind") == "Pod":
        return [document]
    specs: list[dict[str, Any]] = []
    for part in document.values() if isinstance(document, dict) else []:
        for item in part if isinstance(part, list) else [part]:
            if isinstance(item, dict):
                spec = item.get("spec")
                specs += [item] if isinstance(spec, dict) and "containers" in spec else pods(item)
    return specs


def of_kind(resources: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in resources if document["kind"] in kinds]


def ray_clusters(resources: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Kind and specification of every Ray cluster in the manifests."""
    clusters = []
    for document in of_kind(resources, *RAY):
        spec = document["spec"].get("jobTemplate", document["spec"])
        cluster = spec if document["kind"] == "RayCluster" else spec.get("rayClusterSpec", spec.get("rayClusterConfig"))
        if cluster:
            clusters.append((document["kind"], cluster))
    return clusters


def ray_pods(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Heads and workers, without the submitters of jobs."""
    return [
        pod
        for _, cluster in ray_clusters(resources)
        for pod in (cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"]))
    ]
