"""Check KubeRay manifests before any cluster sees them: the CRD's schema, and the rules that no schema can say."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from marl_ray.cluster import job_rules, operator_rules
from marl_ray.cluster.crds import schemas
from marl_ray.cluster.operator_rules import ManifestFault, environment, groups, number
from marl_ray.config.load import YamlLoader
from marl_ray.errors import MarlRayError, one_line

CLUSTER_AT = {
    "RayCluster": (),
    "RayCronJob": ("jobTemplate", "rayClusterSpec"),
    "RayJob": ("rayClusterSpec",),
    "RayService": ("rayClusterConfig",),
}
"""Kind -> the keys in `spec` that lead to the specification of its Ray cluster."""
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
DRAIN_S = 30.0
"""Ray's default of the drain timeout, in seconds."""
ADVICE = "advice: "
"""Begins the message of a finding about what works, but not well."""
GRACE_S = 30
"""Kubernetes' default of `terminationGracePeriodSeconds`, in seconds."""

_SECRET_NAME = re.compile(r"(PASSWORD|PASSWD|SECRET(_ACCESS)?|TOKEN|API_?KEY|PRIVATE_?KEY|CREDENTIALS?)(_KEY)?$", re.I)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s$]+@|[?&]password=[^$]", re.IGNORECASE)


def read_documents(path: str | Path) -> list[Any]:
    """All documents of a YAML file, empty ones left out. Raises MarlRayError naming the file, and the line where it can.

    They hold what JSON holds: YAML also knows sets, bytes, and anchors that lead to themselves.
    """
    try:
        documents = _parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MarlRayError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
    except yaml.YAMLError as error:
        raise MarlRayError(f"{path}: {_yaml_error(error)}") from error
    try:
        json.dumps(documents, allow_nan=False, default=_date)
    except (TypeError, ValueError, RecursionError) as error:
        raise MarlRayError(f"{path}: expected what JSON can hold: {one_line(error)}") from None
    return documents


def is_manifest(document: Any) -> bool:
    """True if a document is meant for Kubernetes; it may still be wrong."""
    return isinstance(document, Mapping) and "kind" in document


def lint_manifest(document: Any, source: str) -> list[str]:
    """All findings in one manifest, each one line `SOURCE: key.path: what was expected`; none if it is good.

    RayService, RayCluster, RayJob and RayCronJob are checked completely. A line with `advice: ` is about what KubeRay
    takes and what runs badly. Other kinds are checked for secrets only: Kubernetes' own tools know those kinds. The caller
    must check the result of `serve_config`.
    """
    return [": ".join(filter(None, (source, path, message))) for path, message in _findings(document)]


def serve_config(document: Any) -> Any:
    """The Serve config inside a RayService (its `serveConfigV2`, parsed); None if there is none or it is no YAML."""
    spec = document.get("spec") if isinstance(document, Mapping) and document.get("kind") == "RayService" else None
    text = spec.get("serveConfigV2") if isinstance(spec, Mapping) else None
    if not isinstance(text, str):
        return None
    try:
        documents = _parse(text)
    except yaml.YAMLError:
        return None
    return documents[0] if len(documents) == 1 else None


def replica_pods(document: Any) -> int:
    """Number of pods of a manifest without findings that may run replicas: all workers, and a head that has CPUs."""
    cluster, _ = _cluster(document)
    workers = sum(
        group.get("maxReplicas", operator_rules.MOST) * group.get("numOfHosts", 1)
        for group in cluster.get("workerGroupSpecs", [])
    )
    return int(workers) + (not _head_is_idle(cluster["headGroupSpec"]))


def _findings(document: Any) -> Iterator[ManifestFault]:
    if not isinstance(document, Mapping):
        yield "", f"expected a mapping of keys at the top, got {type(document).__name__}"
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
        yield from _rules(document)


def _rules(document: Mapping[str, Any]) -> Iterator[ManifestFault]:
    cluster, where = _cluster(document)
    yield from operator_rules.of_metadata(document)
    if document["kind"] == "RayService":
        yield from operator_rules.of_service(document["spec"])
        yield from _serve_config_is_yaml(document["spec"])
    if document["kind"] == "RayJob":
        yield from job_rules.of_job(document["spec"], "spec.")
    if document["kind"] == "RayCronJob":
        yield from job_rules.of_cron_job(document["spec"])
    if cluster:
        yield from operator_rules.of_cluster(cluster, document["metadata"].get("annotations", {}), where)
        yield from _mounts(cluster, where)
    for path, message in _advice(document, cluster, where):
        yield path, f"{ADVICE}{message}"


def _advice(document: Mapping[str, Any], cluster: Mapping[str, Any], where: str) -> Iterator[ManifestFault]:
    """Findings about what KubeRay takes, and what runs badly or tells secrets."""
    if cluster:
        yield from _operations(cluster, where)
        if document["kind"] in ("RayJob", "RayCronJob"):
            spec = document["spec"] if document["kind"] == "RayJob" else document["spec"]["jobTemplate"]
            yield from job_rules.advice_for_job(spec, where.removesuffix("rayClusterSpec."))
    yield from _secrets(document, "")


def _serve_config_is_yaml(spec: Mapping[str, Any]) -> Iterator[ManifestFault]:
    try:
        documents = _parse(spec.get("serveConfigV2", ""))
    except yaml.YAMLError as error:
        yield "spec.serveConfigV2", _yaml_error(error)
        return
    if len(documents) != 1:
        yield "spec.serveConfigV2", f"expected one Serve config, got {len(documents)}"


def _operations(cluster: Mapping[str, Any], where: str) -> Iterator[ManifestFault]:
    """Findings about settings that run, but not well."""
    if not _head_is_idle(cluster["headGroupSpec"]):
        message = 'expected "0": work on the head takes the whole cluster down when it runs out of memory'
        yield f"{where}headGroupSpec.rayStartParams.num-cpus", message
    for path, group in groups(cluster, where):
        pod = group["template"]["spec"]
        drain_s = number(environment(pod).get(DRAIN_VARIABLE, {}).get("value"), DRAIN_S)
        grace_s = pod.get("terminationGracePeriodSeconds", GRACE_S)
        if "workerGroupSpecs" in path and grace_s <= drain_s:
            message = f"expected more than {drain_s:g}, the seconds that Ray drains ({DRAIN_VARIABLE}), got {grace_s}"
            yield f"{path}template.spec.terminationGracePeriodSeconds", message
        for at, container in _containers(pod, path):
            if problem := _moving_image(container.get("image", "")):
                yield f"{at}image", problem
    if problem := _moving_image(cluster.get("autoscalerOptions", {}).get("image", "of:operator")):
        yield f"{where}autoscalerOptions.image", problem


def _mounts(cluster: Mapping[str, Any], where: str) -> Iterator[ManifestFault]:
    """Mounts without a volume: KubeRay takes them, and Kubernetes refuses its pods."""
    for path, group in groups(cluster, where):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for at, container in _containers(pod, path):
            for j, mount in enumerate(container.get("volumeMounts", [])):
                if mount["name"] not in volumes:
                    yield f"{at}volumeMounts.{j}.name", f"expected one of the pod's volumes, got {mount['name']!r}"


def _containers(pod: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A pod's containers, each with its path (with a dot at its end)."""
    for kind in ("initContainers", "containers"):
        for k, container in enumerate(pod.get(kind, [])):
            yield f"{path}template.spec.{kind}.{k}.", container


def _moving_image(image: str) -> str:
    _, _, tag = image.rpartition("/")[2].partition(":")
    if not image or (tag in ("", "latest") and "@sha256:" not in image):
        return f"expected an image with a tag other than latest, or a digest, got {image!r}"
    return ""


def _secrets(part: Any, where: str) -> Iterator[ManifestFault]:
    """Environment variables, at any depth, whose value is a secret in plain sight."""
    if isinstance(part, list):
        for k, item in enumerate(part):
            yield from _secrets(item, f"{where}{k}.")
    elif isinstance(part, Mapping):
        name, value = part.get("name"), part.get("value")
        # `$(NAME)` is another variable, which Kubernetes fills in.
        if isinstance(name, str) and isinstance(value, str) and value and "$(" not in value:
            if _SECRET_NAME.search(name):
                yield f"{where}value", f"expected valueFrom.secretKeyRef for {name}, not a secret in plain sight"
            elif _PASSWORD_IN_URL.search(value):
                yield f"{where}value", f"expected no password in the URL of {name}; take it from a Secret"
        if isinstance(part.get("redisPassword"), Mapping) and part["redisPassword"].get("value"):
            yield f"{where}redisPassword.value", "expected valueFrom.secretKeyRef, not a password in plain sight"
        for key, item in part.items():
            yield from _secrets(item, f"{where}{key}.")


def _head_is_idle(head: Mapping[str, Any]) -> bool:
    cpus = head.get("rayStartParams", {}).get("num-cpus", head.get("resources", {}).get("CPU"))
    return number(cpus, 1.0) == 0


def _cluster(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The specification of the Ray cluster, and its path with a dot at its end."""
    cluster, where = document["spec"], "spec."
    for key in CLUSTER_AT[document["kind"]]:
        cluster, where = cluster.get(key, {}), f"{where}{key}."
    return cluster, where


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
        yield (f"{where}.{name}" if where else name), "missing"
    elif error.validator == "type":
        quoted = ", in quotes" if schema["type"] == "string" and isinstance(instance, bool | int | float) else ""
        yield where, f"expected {schema['type']}{quoted}, got {type(instance).__name__}"
    elif error.validator == "enum":
        yield where, f"expected one of {', '.join(map(str, schema['enum']))}, got {instance!r}"
    elif error.validator in ("anyOf", "pattern") and "anyOf" in schema:
        yield where, f"expected a number or a quantity such as 500m or 2Gi, got {instance!r}"
    else:
        yield where, f"expected {error.validator} {error.validator_value}, got {instance!r}"


def _parse(text: str) -> list[Any]:
    return [document for document in yaml.load_all(text, YamlLoader) if document is not None]


def _date(value: Any) -> str:
    """A date without quotes, which its reader takes as text."""
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"got {type(value).__name__} {value!r:.40}")


def _yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark else ""
    return f"not valid YAML{where}: {getattr(error, 'problem', None) or one_line(error)}"
