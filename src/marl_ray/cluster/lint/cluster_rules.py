"""Rules for metadata and Ray clusters that KubeRay's operator (v1.7.0) checks by its own code, and no schema does.

The operator refuses a manifest that breaks one, so its cluster never starts. Rules of alpha features that are off by
default (RocksDB, TLS and the history server) are left out.
"""

import re
from collections.abc import Iterator, Mapping

from marl_ray.cluster.lint.parts import DEFAULT_MAX_REPLICAS, ManifestFault, environment, groups
from marl_ray.json_types import JsonMapping

LONE_CLUSTER_PATH = "spec."
"""Place of the specification of a RayCluster that belongs to no job or service."""
MAX_NAME_LENGTHS = {"RayCluster": 53, "RayService": 47, "RayJob": 47, "RayCronJob": 37}
"""Kind -> greatest length of a name. KubeRay appends to names to make names of Services, which end at 63."""
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_GROUP_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_DURATION = re.compile(r"\+?\d+|\+?((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))+")
_AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"
_MANAGED_BY = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
_GCS_VARIABLES = {"REDIS_PASSWORD": "redisPassword", "RAY_REDIS_ADDRESS": "redisAddress"}


def metadata_rules(document: JsonMapping) -> Iterator[ManifestFault]:
    """Yield the rules for the name, the annotations and `managedBy`."""
    metadata, kind = document["metadata"], document["kind"]
    # The server appends five characters to `generateName`.
    max_length = MAX_NAME_LENGTHS[kind]
    name = metadata.get("name") or (f"{metadata['generateName']}aaaaa" if metadata.get("generateName") else "")
    if not _DNS_LABEL.fullmatch(name) or len(name) > max_length:
        yield "metadata.name", f"expected a-z, 0-9 and -, a letter first, {max_length} characters at most, got {name!r}"
    timeout = metadata.get("annotations", {}).get("ray.io/initializing-timeout", "")
    if kind == "RayService" and timeout and not (_DURATION.fullmatch(timeout) and re.search("[1-9]", timeout)):
        yield "metadata.annotations.ray.io/initializing-timeout", f"expected a duration such as 5m, got {timeout!r}"
    yield from _managed_by_rules(document["spec"], "spec.")
    if kind == "RayCronJob":
        yield from _managed_by_rules(document["spec"]["jobTemplate"], "spec.jobTemplate.")


def cluster_rules(cluster: JsonMapping, annotations: Mapping[str, str], where: str) -> Iterator[ManifestFault]:
    """Yield the rules for the specification of a Ray cluster, which stands at `where` (with a dot at its end)."""
    if where != LONE_CLUSTER_PATH:
        yield from _embedded_cluster_rules(cluster, where)
    head = cluster["headGroupSpec"]
    for path, group in groups(cluster, where):
        yield from _group_rules(group, path)
    variables = environment(head["template"]["spec"])
    yield from _fault_tolerance_rules(cluster, annotations, variables, where)
    yield from _autoscaling_rules(cluster, variables, where)
    yield from _authentication_rules(cluster, where)
    yield from _network_policy_rules(cluster, where)


def _embedded_cluster_rules(cluster: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Yield the keys that only a RayCluster that stands alone may have.

    The clusters of jobs and services would be refused with them.
    """
    if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
        yield f"{where}authOptions.enableK8sTokenAuth", "expected none: only a RayCluster may have it"
    if cluster.get("upgradeStrategy", {}).get("type"):
        yield f"{where}upgradeStrategy.type", "expected none: it is for a RayCluster that stands alone"
    yield from _managed_by_rules(cluster, where)


def _managed_by_rules(spec: JsonMapping, where: str) -> Iterator[ManifestFault]:
    """Check `managedBy`, which the CRD states in CEL, and which the schemas leave out."""
    managed_by = spec.get("managedBy", _MANAGED_BY[0])
    if managed_by not in _MANAGED_BY:
        yield f"{where}managedBy", f"expected one of {', '.join(_MANAGED_BY)}, got {managed_by!r}"


def _group_rules(group: JsonMapping, path: str) -> Iterator[ManifestFault]:
    if not group["template"]["spec"].get("containers"):
        yield f"{path}template.spec.containers", "expected at least one"
    params = group.get("rayStartParams", {})
    doubled_keys = [key for key in ("num-cpus", "num-gpus", "memory", "resources") if params.get(key)]
    if doubled_keys and group.get("resources"):
        yield f"{path}resources", f"expected none beside rayStartParams.{doubled_keys[0]}"
    if "labels" in params:
        yield f"{path}rayStartParams.labels", f"expected {path}labels instead"
    for key, value in group.get("labels", {}).items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            yield f"{path}labels.{key}", f"expected a label of Kubernetes, got {key}={value}"
    low, high = group.get("minReplicas", 0), group.get("maxReplicas", DEFAULT_MAX_REPLICAS)
    if low < 0 or high < low:
        yield f"{path}minReplicas", f"expected 0 to maxReplicas ({high}), got {low}"


def _fault_tolerance_rules(
    cluster: JsonMapping, annotations: Mapping[str, str], variables: JsonMapping, where: str
) -> Iterator[ManifestFault]:
    options = cluster.get("gcsFaultToleranceOptions")
    params, head = cluster["headGroupSpec"].get("rayStartParams", {}), f"{where}headGroupSpec."
    at = f"{head}template.spec.containers.0.env."
    if params.get("redis-username") or "REDIS_USERNAME" in variables:
        path = f"{at}REDIS_USERNAME" if "REDIS_USERNAME" in variables else f"{head}rayStartParams.redis-username"
        yield path, "expected gcsFaultToleranceOptions.redisUsername instead"
    if options is None:
        if "RAY_REDIS_ADDRESS" in variables and annotations.get("ray.io/ft-enabled", "").lower() != "true":
            yield f"{at}RAY_REDIS_ADDRESS", "expected gcsFaultToleranceOptions.redisAddress instead"
        return
    for name, key in _GCS_VARIABLES.items():
        if name in variables:
            yield f"{at}{name}", f"expected gcsFaultToleranceOptions.{key} instead"
    if params.get("redis-password"):
        yield f"{head}rayStartParams.redis-password", "expected gcsFaultToleranceOptions.redisPassword instead"
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(name):
            yield f"metadata.annotations.{name}", "expected none beside gcsFaultToleranceOptions"
    if options.get("backend", "redis") == "redis" and options.get("storage"):
        yield f"{where}gcsFaultToleranceOptions.storage", "expected none with Redis; it is for the backend rocksdb"


def _autoscaling_rules(cluster: JsonMapping, variables: JsonMapping, where: str) -> Iterator[ManifestFault]:
    enabled, options = cluster.get("enableInTreeAutoscaling"), cluster.get("autoscalerOptions", {})
    variable = f"{where}headGroupSpec.template.spec.containers.0.env.{_AUTOSCALER_V2}"
    by_variable = variables.get(_AUTOSCALER_V2, {}).get("value") in ("1", "true")
    version = options.get("version")
    # From 2.47 on, Ray takes version 2 when nothing is said; for these two keys the operator wants it said.
    is_v2 = version == "v2" or by_variable or (version is None and _ray_version(cluster) >= (2, 47))
    if by_variable and not enabled:
        yield variable, "expected enableInTreeAutoscaling: true beside it"
    if enabled and version and _AUTOSCALER_V2 in variables:
        yield variable, "expected none beside autoscalerOptions.version"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield f"{where}autoscalerOptions.idleTimeoutSeconds", "expected 0 or more"
    if any(entry["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for entry in options.get("env", [])):
        yield f"{where}autoscalerOptions.env", "expected no KUBERAY_GEN_AUTOSCALER_START_CMD, which is KubeRay's own"
    for path, group in groups(cluster, where):
        if enabled and group.get("suspend"):
            yield f"{path}suspend", "expected none with enableInTreeAutoscaling"
        if enabled and is_v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{path}template.spec.restartPolicy", "expected Never with version 2 of the autoscaler"
        if group.get("idleTimeoutSeconds", 0) < 0:
            yield f"{path}idleTimeoutSeconds", "expected 0 or more"
        v2_keys = [
            key for key in ("idleTimeoutSeconds", "priority") if key in group and (group[key] or key != "priority")
        ]
        for key in v2_keys if version != "v2" and not by_variable else ():
            yield f"{path}{key}", "expected autoscalerOptions.version: v2 beside it"
        if group.get("priority") and _ray_version(cluster) < (2, 56):
            yield f"{path}priority", f"expected a rayVersion of 2.56.0 or later, got {cluster.get('rayVersion')!r}"


def _authentication_rules(cluster: JsonMapping, where: str) -> Iterator[ManifestFault]:
    options = cluster.get("authOptions", {})
    by_kubernetes = options.get("enableK8sTokenAuth")
    if options.get("mode") != "token":
        if by_kubernetes:
            yield f"{where}authOptions.mode", "expected token beside enableK8sTokenAuth"
        return
    min_version = (2, 55) if by_kubernetes else (2, 52)
    if _ray_version(cluster) < min_version:
        message = (
            f"expected {min_version[0]}.{min_version[1]}.0 or later for authOptions, got {cluster.get('rayVersion')!r}"
        )
        yield f"{where}rayVersion", message
    if by_kubernetes and options.get("secretName"):
        yield f"{where}authOptions.secretName", "expected none beside enableK8sTokenAuth"


def _network_policy_rules(cluster: JsonMapping, where: str) -> Iterator[ManifestFault]:
    policy = cluster.get("networkPolicy", {})
    unused = {"DenyAllEgress": "ingressRules", "DenyAllIngress": "egressRules"}.get(policy.get("mode", "DenyAll"))
    named_groups = [(f"workerGroups.{k}", rules) for k, rules in enumerate(policy.get("workerGroups", []))]
    for name, rules in [("head", policy.get("head", {})), ("worker", policy.get("worker", {})), *named_groups]:
        if unused and rules.get(unused):
            yield f"{where}networkPolicy.{name}.{unused}", f"expected none with mode {policy['mode']}"
    group_names = [group["groupName"] for group in cluster.get("workerGroupSpecs", [])]
    for k, name in enumerate(group_names if policy else ()):
        if not _GROUP_NAME.fullmatch(name) or len(name) > 63:
            yield (
                f"{where}workerGroupSpecs.{k}.groupName",
                f"expected a-z, 0-9 and - beside networkPolicy, got {name!r}",
            )
    for name, rules in named_groups:
        if rules["groupName"] not in group_names:
            message = f"expected one of {', '.join(group_names)}, got {rules['groupName']!r}"
            yield f"{where}networkPolicy.{name}.groupName", message


def _ray_version(cluster: JsonMapping) -> tuple[int, int]:
    """Return Ray's version as (major, minor); (0, 0) if it is not given, or is no version."""
    match = re.match(r"\s*v?(\d+)\.(\d+)", cluster.get("rayVersion", ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)
