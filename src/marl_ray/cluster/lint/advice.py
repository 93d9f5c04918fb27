"""Advice about manifests that KubeRay takes and that run badly, or that tell secrets."""

from collections.abc import Iterator, Mapping

import yaml

from marl_ray.cluster.lint import job_rules
from marl_ray.cluster.lint.parts import ManifestFault, containers, environment, groups, head_is_idle, parse_number
from marl_ray.config.cluster import DRAIN_VARIABLE
from marl_ray.config.serving.plain_secrets import has_password, names_secret, secret_variables
from marl_ray.json_types import JsonMapping

DRAIN_S = 30.0
"""Ray's default of the drain timeout, in seconds."""
GRACE_S = 30
"""Kubernetes' default of `terminationGracePeriodSeconds`, in seconds."""
FEATURE_GATES = {
    "historyServerOptions": "RayClusterHistoryServer",
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
}
"""Keys of a Ray cluster that KubeRay's operator (v1.7.0) refuses unless it has a feature gate -> the gate."""


def advice(document: JsonMapping, cluster: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Yield the findings about what KubeRay takes, and what runs badly or tells secrets."""
    if cluster:
        yield from _operation_advice(cluster, where)
        if document["kind"] in ("RayJob", "RayCronJob"):
            spec = document["spec"] if document["kind"] == "RayJob" else document["spec"]["jobTemplate"]
            yield from job_rules.advice_for_job(spec, where.removesuffix("rayClusterSpec."))
    yield from _secret_advice(document, "")


def _operation_advice(cluster: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Yield the findings about settings that run, but not well."""
    if not head_is_idle(cluster["headGroupSpec"]):
        message = 'expected "0": work on the head takes the whole cluster down when it runs out of memory'
        yield f"{where}headGroupSpec.rayStartParams.num-cpus", message
    for path, group in groups(cluster, where):
        pod = group["template"]["spec"]
        drain_s = parse_number(environment(pod).get(DRAIN_VARIABLE, {}).get("value"), DRAIN_S)
        grace_s = pod.get("terminationGracePeriodSeconds", GRACE_S)
        if "workerGroupSpecs" in path and grace_s <= drain_s:
            message = f"expected more than {drain_s:g}, the seconds that Ray drains ({DRAIN_VARIABLE}), got {grace_s}"
            yield f"{path}template.spec.terminationGracePeriodSeconds", message
        for container_path, container in containers(pod, path):
            if fault := _image_fault(container.get("image", "")):
                yield f"{container_path}image", fault
    if fault := _image_fault(cluster.get("autoscalerOptions", {}).get("image", "of:operator")):
        yield f"{where}autoscalerOptions.image", fault
    for key in (key for key in FEATURE_GATES if key in cluster):
        yield f"{where}{key}", f"expected none, unless the operator has the feature gate {FEATURE_GATES[key]}"
    if cluster.get("gcsFaultToleranceOptions", {}).get("backend") == "rocksdb":
        message = "expected redis, unless the operator has the feature gate GCSFaultToleranceEmbeddedStorage"
        yield f"{where}gcsFaultToleranceOptions.backend", message


def _image_fault(image: str) -> str:
    """Return what is expected of an image that changes under its name; empty for one that does not."""
    _, _, tag = image.rpartition("/")[2].partition(":")
    if not image or (tag in ("", "latest") and "@sha256:" not in image):
        return f"expected an image with a tag other than latest, or a digest, got {image!r}"
    return ""


def _secret_advice(part: object, where: str) -> Iterator[ManifestFault]:
    """Yield the environment variables, at any depth, whose value is a secret in plain sight."""
    if isinstance(part, list):
        for k, item in enumerate(part):
            yield from _secret_advice(item, f"{where}{k}.")
    elif isinstance(part, Mapping):
        name, value = part.get("name"), part.get("value")
        # `$(NAME)` is another variable, which Kubernetes fills in.
        if isinstance(name, str) and isinstance(value, str) and value and "$(" not in value:
            if names_secret(name):
                yield f"{where}value", f"expected valueFrom.secretKeyRef for {name}, not a secret in plain sight"
            elif has_password(value):
                yield f"{where}value", f"expected no password in the URL of {name}; take it from a Secret"
        if isinstance(part.get("runtimeEnvYAML"), str):
            for variable in _secrets_of_runtime_env(part["runtimeEnvYAML"]):
                message = (
                    f"expected no secret in env_vars.{variable}, where the dashboard shows it; take it from a Secret"
                )
                yield f"{where}runtimeEnvYAML", message
        if isinstance(part.get("redisPassword"), Mapping) and part["redisPassword"].get("value"):
            yield f"{where}redisPassword.value", "expected valueFrom.secretKeyRef, not a password in plain sight"
        for key, item in part.items():
            yield from _secret_advice(item, f"{where}{key}.")


def _secrets_of_runtime_env(text: str) -> list[str]:
    """Return the variables of a runtime environment that are secrets; none if the text is no YAML, which is a fault."""
    try:
        runtime_env = job_rules.read_runtime_env(text)
    except yaml.YAMLError:
        return []
    return secret_variables(runtime_env.get("env_vars")) if isinstance(runtime_env, Mapping) else []
