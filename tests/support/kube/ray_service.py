"""The RayService of the repository, and the manifests that small changes make of it."""

import json
from pathlib import Path
from typing import Any

from marl_ray.cluster.lint.documents import read_documents

PATH = Path(__file__).parents[3] / "cluster" / "kuberay" / "rayservice.yaml"
DOCUMENTS = read_documents(PATH)
SERVICE: dict[str, Any] = DOCUMENTS[0]
"""The RayService; the other documents are what stands beside it."""
CLUSTER = "spec.rayClusterConfig"
HEAD, WORKERS = f"{CLUSTER}.headGroupSpec", f"{CLUSTER}.workerGroupSpecs.0"
HEAD_POD, WORKER_POD = f"{HEAD}.template.spec", f"{WORKERS}.template.spec"
"""Paths of its parts."""
DELETE = object()
"""Value of a change that takes its key away."""


def change_manifest(*changes: tuple[str, Any], document: dict[str, Any] = SERVICE) -> dict[str, Any]:
    """A manifest with values set (or deleted, or appended with `+` as the last part) at paths, parts apart by dots."""
    data: dict[str, Any] = json.loads(json.dumps(document))  # no part is shared, as YAML's anchors make it
    for path, value in changes:
        *parents, last = path.split(".")
        node: Any = data
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is DELETE:
            del node[last]
        elif last == "+":
            node.append(value)
        else:
            node[int(last) if isinstance(node, list) else last.replace("|", ".")] = value
    return data


def variable(pod: str, name: str, value: str) -> tuple[str, Any]:
    return (f"{pod}.containers.0.env.+", {"name": name, "value": value})
