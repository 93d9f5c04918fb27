"""Reads the schemas of KubeRay's kinds from the JSON file beside this one, and makes that file from KubeRay's CRDs.

The file is made again by `python -m marl_ray.cluster.lint.schemas CRD.yaml ... > kuberay-v1.7.0.json`, where the
arguments are ray.io_rayclusters.yaml, ray.io_rayjobs.yaml, ray.io_rayservices.yaml and ray.io_raycronjobs.yaml.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from marl_ray.json_types import JsonObject

KUBERAY_VERSION = "1.7.0"
"""Release of KubeRay whose schemas are kept."""
NOTICE = (
    f"Made from the CRDs of KubeRay v{KUBERAY_VERSION} "
    "(https://github.com/ray-project/kuberay, ray-operator/config/crd/bases). Copyright the KubeRay authors, Apache "
    "License 2.0 (https://www.apache.org/licenses/LICENSE-2.0). Changed: version v1 only, without status, descriptions, "
    "defaults and CEL rules; unknown properties refused; equal parts shared."
)
_KEPT_KEYWORDS = ("type", "enum", "required", "anyOf", "pattern", "minimum", "minLength", "maxLength", "minItems")
_TEXT_MAP: JsonObject = {"type": "object", "additionalProperties": {"type": "string"}}
# The API server checks metadata by itself, so the CRDs say nothing about it.
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _TEXT_MAP,
        "annotations": _TEXT_MAP,
    }
    | {"generateName": {"type": "string"}, "finalizers": {"type": "array", "items": {"type": "string"}}},
    "additionalProperties": False,
}


@cache
def schemas() -> JsonObject:
    """Return JSON Schemas (draft 2020-12) by kind, in which unknown properties are refused.

    `$defs` has what they share.
    """
    data: JsonObject = json.loads(
        Path(__file__).with_name(f"kuberay-v{KUBERAY_VERSION}.json").read_text(encoding="utf-8")
    )
    return data


def minimise(crds: list[JsonObject]) -> JsonObject:
    """Return the schemas of CustomResourceDefinitions, stripped of what validation does not need.

    Equal parts become one.
    """
    kinds: JsonObject = {}
    for crd in crds:
        version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")
        schema = _strict(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {"metadata": _METADATA}
        del schema["properties"]["status"]
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        kinds[crd["spec"]["names"]["kind"]] = schema
    counts: Counter[str] = Counter()
    for schema in kinds.values():
        _count(schema, counts)
    shared: dict[str, JsonObject] = {}
    names: dict[str, str] = {}
    kinds = {kind: _share(schema, counts, names, shared) for kind, schema in kinds.items()}
    return {"$comment": NOTICE, "$defs": shared, "kinds": kinds}


def _strict(node: JsonObject) -> JsonObject:
    out = {key: node[key] for key in _KEPT_KEYWORDS if key in node}
    properties = node.get("properties", {})
    # The API server fills defaults in before it validates.
    required = [name for name in node.get("required", ()) if "default" not in properties.get(name, {})]
    out = out | {"required": required} if required else {key: out[key] for key in out if key != "required"}
    if node.get("nullable"):
        out["type"] = [node["type"], "null"]
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            out[key] = _strict(node[key])
    if "properties" in node:
        out["properties"] = {name: _strict(part) for name, part in properties.items()}
        if "metadata" in properties:  # of a pod, which the server drops where it is null
            out["properties"]["metadata"] = out["properties"]["metadata"] | {"type": ["object", "null"]}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
    return out


def _parts(node: JsonObject) -> Iterator[JsonObject]:
    yield from node.get("properties", {}).values()
    yield from (node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict))


def _count(node: JsonObject, counts: Counter[str]) -> None:
    text = json.dumps(node, sort_keys=True)
    counts[text] += 1
    if counts[text] == 1:
        for part in _parts(node):
            _count(part, counts)


def _share(
    node: JsonObject,
    counts: Counter[str],
    names: dict[str, str],
    shared: dict[str, JsonObject],
    top: bool = True,
) -> JsonObject:
    text = json.dumps(node, sort_keys=True)
    if not top and counts[text] > 1 and len(text) > 60:
        if text not in names:
            names[text] = f"part{len(names)}"
            shared[names[text]] = _share(node, counts, names, shared)
        return {"$ref": f"#/$defs/{names[text]}"}
    out = dict(node)
    if "properties" in node:
        out["properties"] = {k: _share(part, counts, names, shared, False) for k, part in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            out[key] = _share(node[key], counts, names, shared, False)
    return out


if __name__ == "__main__":
    minimised = minimise([yaml.safe_load(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]])
    # One line for each definition, so that the difference between two releases can be read.
    print(json.dumps(minimised, separators=(",", ":")).replace('"part', '\n"part'))
