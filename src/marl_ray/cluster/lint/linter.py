"""Checks a KubeRay manifest against the schema of its kind and against the rules that no schema can say."""

import difflib
from collections.abc import Iterator, Mapping

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from marl_ray.cluster.lint import cluster_rules, job_rules, service_rules
from marl_ray.cluster.lint.advice import advice
from marl_ray.cluster.lint.parts import (
    DEFAULT_MAX_REPLICAS,
    ManifestFault,
    containers,
    groups,
    head_is_idle,
    ray_cluster,
)
from marl_ray.cluster.lint.schemas import schemas
from marl_ray.errors import type_name
from marl_ray.json_types import JsonMapping

ADVICE_PREFIX = "advice: "
"""Begins the message of a finding about what works, but not well."""


def lint_manifest(document: object, source: str) -> list[str]:
    """Return all findings in one manifest, each a line `SOURCE: key.path: what was expected`.

    RayService, RayCluster, RayJob and RayCronJob are checked completely. A line with `advice: ` is about what KubeRay
    takes and what runs badly. Other kinds are checked for secrets only: Kubernetes' own tools know those kinds. The caller
    must check the result of `embedded_serve_config`.
    """
    return [": ".join(filter(None, (source, path, message))) for path, message in _findings(document)]


def replica_pods(document: JsonMapping) -> int:
    """Return the number of pods of a manifest without findings that may run replicas.

    All workers may, and a head that has CPUs.
    """
    cluster, _ = ray_cluster(document)
    workers = sum(
        group.get("maxReplicas", DEFAULT_MAX_REPLICAS) * group.get("numOfHosts", 1)
        for group in cluster.get("workerGroupSpecs", [])
    )
    return int(workers) + (not head_is_idle(cluster["headGroupSpec"]))


def _findings(document: object) -> Iterator[ManifestFault]:
    if not isinstance(document, Mapping):
        yield "", f"expected a mapping of keys at the top, got {type_name(document)}"
        return
    kind, version = document.get("kind"), document.get("apiVersion")
    schemas_of_kinds = schemas()["kinds"]
    if kind == "Secret" and (document.get("data") or document.get("stringData")):
        yield "kind", "expected no Secret with its data in a file; make it with kubectl or a secret operator"
    if not str(version).startswith("ray.io/") and not str(kind).startswith("Ray"):
        return
    if version != "ray.io/v1":
        yield "apiVersion", f"expected ray.io/v1, got {version!r}"
    if kind not in schemas_of_kinds:
        yield "kind", f"expected one of {', '.join(schemas_of_kinds)}, got {kind!r}"
        return
    validator = Draft202012Validator({"$defs": schemas()["$defs"]} | schemas_of_kinds[kind])
    errors = sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
    for error in errors:
        yield from _explain(error)
    # The rules read values, so the values must have their types; a key too many does not matter to them.
    if all(error.validator == "additionalProperties" for error in errors):
        yield from _rule_findings(document)


def _rule_findings(document: JsonMapping) -> Iterator[ManifestFault]:
    cluster, where = ray_cluster(document)
    yield from cluster_rules.metadata_rules(document)
    if document["kind"] == "RayService":
        yield from service_rules.service_rules(document["spec"])
        yield from service_rules.serve_config_rules(document["spec"])
    if document["kind"] == "RayJob":
        yield from job_rules.job_rules(document["spec"], "spec.")
    if document["kind"] == "RayCronJob":
        yield from job_rules.cron_job_rules(document["spec"])
    if cluster:
        yield from cluster_rules.cluster_rules(cluster, document["metadata"].get("annotations", {}), where)
        yield from _mount_findings(cluster, where)
    for path, message in advice(document, cluster, where):
        yield path, f"{ADVICE_PREFIX}{message}"


def _mount_findings(cluster: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Yield the mounts without a volume: KubeRay takes them, and Kubernetes refuses its pods."""
    for path, group in groups(cluster, where):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container_path, container in containers(pod, path):
            for j, mount in enumerate(container.get("volumeMounts", [])):
                if mount["name"] not in volumes:
                    yield (
                        f"{container_path}volumeMounts.{j}.name",
                        f"expected one of the pod's volumes, got {mount['name']!r}",
                    )


def _explain(error: ValidationError) -> Iterator[ManifestFault]:
    where = ".".join(map(str, error.absolute_path))
    schema, instance = error.schema, error.instance
    assert isinstance(schema, dict)
    if error.validator == "additionalProperties":
        properties = schema.get("properties", {})
        for key in (key for key in instance if key not in properties):
            close = difflib.get_close_matches(str(key), properties, 1)
            path = f"{where}.{key}" if where else str(key)
            yield path, "unknown key" + (f", did you mean {close[0]!r}?" if close else "")
        return
    if error.validator == "required":
        name = error.message.split("'")[1]
        yield (f"{where}.{name}" if where else name), "missing key"
    elif error.validator == "type":
        quoted = ", in quotes" if schema["type"] == "string" and isinstance(instance, bool | int | float) else ""
        yield where, f"expected {schema['type']}{quoted}, got {type_name(instance)}"
    elif error.validator == "enum":
        yield where, f"expected one of {', '.join(map(str, schema['enum']))}, got {instance!r}"
    elif error.validator in ("anyOf", "pattern") and "anyOf" in schema:
        yield where, f"expected a number or a quantity such as 500m or 2Gi, got {instance!r}"
    else:
        yield where, f"expected {error.validator} {error.validator_value}, got {instance!r}"
