"""Reads the schemas of KubeRay's kinds from the JSON file beside this one, and makes that file.

The JSON file is made from KubeRay's CRDs by `python -m marl_ray.cluster.lint.schemas CRD.yaml ... >
kuberay-v1.7.0.json`, where the arguments are ray.io_rayclusters.yaml, ray.io_rayjobs.yaml, ray.io_rayservices.yaml and
ray.io_raycronjobs.yaml.
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
MIN_SHARED_LENGTH = 61
"""Minimum number of characters of a part, as JSON, that is shared: a shorter one is hardly longer than a reference."""
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
    kept_schemas: JsonObject = json.loads(
        Path(__file__).with_name(f"kuberay-v{KUBERAY_VERSION}.json").read_text(encoding="utf-8")
    )
    return kept_schemas


def minimise(crds: list[JsonObject]) -> JsonObject:
    """Return the schemas of CustomResourceDefinitions, stripped of what validation does not need.

    Equal parts become one.
    """
    kinds: JsonObject = {}
    for crd in crds:
        version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
        schema = _strict_schema(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {"metadata": _METADATA}
        del schema["properties"]["status"]
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        kinds[crd["spec"]["names"]["kind"]] = schema
    counts: Counter[str] = Counter()
    for schema in kinds.values():
        _count_parts(schema, counts)
    shared: dict[str, JsonObject] = {}
    names: dict[str, str] = {}
    kinds = {kind: _share_parts(schema, counts, names, shared) for kind, schema in kinds.items()}
    return {"$comment": NOTICE, "$defs": shared, "kinds": kinds}


def _strict_schema(node: JsonObject) -> JsonObject:
    """Return a schema with the kept keywords alone, in which unknown properties are refused."""
    strict = {key: node[key] for key in _KEPT_KEYWORDS if key in node}
    properties = node.get("properties", {})
    # The API server fills defaults in before it validates.
    required = [name for name in node.get("required", ()) if "default" not in properties.get(name, {})]
    strict = strict | {"required": required} if required else {key: strict[key] for key in strict if key != "required"}
    if node.get("nullable"):
        strict["type"] = [node["type"], "null"]
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            strict[key] = _strict_schema(node[key])
    if "properties" in node:
        strict["properties"] = {name: _strict_schema(part) for name, part in properties.items()}
        if "metadata" in properties:  # of a pod, which the server drops where it is null
            strict["properties"]["metadata"] = strict["properties"]["metadata"] | {"type": ["object", "null"]}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    return strict


def _inner_schemas(node: JsonObject) -> Iterator[JsonObject]:
    """Yield the schemas of what a schema's values hold."""
    yield from node.get("properties", {}).values()
    yield from (node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict))


def _count_parts(node: JsonObject, counts: Counter[str]) -> None:
    """Count how often each part of a schema occurs, as JSON; the inner parts of equal ones count once."""
    text = json.dumps(node, sort_keys=True)
    counts[text] += 1
    if counts[text] == 1:
        for part in _inner_schemas(node):
            _count_parts(part, counts)


def _share_parts(
    node: JsonObject,
    counts: Counter[str],
    names: dict[str, str],
    shared: dict[str, JsonObject],
    top: bool = True,
) -> JsonObject:
    """Return a schema in which the parts that occur more than once refer to `shared`, where this puts them by `names`."""
    text = json.dumps(node, sort_keys=True)
    if not top and counts[text] > 1 and len(text) >= MIN_SHARED_LENGTH:
        if text not in names:
            names[text] = f"part{len(names)}"
            shared[names[text]] = _share_parts(node, counts, names, shared)
        return {"$ref": f"#/$defs/{names[text]}"}
    copy = dict(node)
    if "properties" in node:
        copy["properties"] = {
            k: _share_parts(part, counts, names, shared, False) for k, part in node["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            copy[key] = _share_parts(node[key], counts, names, shared, False)
    return copy


if __name__ == "__main__":
    minimised = minimise([yaml.safe_load(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]])
    # One line for each definition, so that the difference between two releases can be read.
    print(json.dumps(minimised, separators=(",", ":")).replace('"part', '\n"part'))
