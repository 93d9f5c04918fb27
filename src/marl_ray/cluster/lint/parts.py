"""The parts of a manifest that rules read, from its Ray cluster to the variables of a container."""

from collections.abc import Iterator

from marl_ray.json_types import JsonMapping, JsonValue

ManifestFault = tuple[str, str]
"""Path of a key, and the value expected there."""

CLUSTER_KEYS = {
    "RayCluster": (),
    "RayCronJob": ("jobTemplate", "rayClusterSpec"),
    "RayJob": ("rayClusterSpec",),
    "RayService": ("rayClusterConfig",),
}
"""Kind -> the keys in `spec` that lead to the specification of its Ray cluster."""
DEFAULT_MAX_REPLICAS = 2**31 - 1
"""KubeRay's default of `maxReplicas`, the greatest number of 32 bits."""


def ray_cluster(document: JsonMapping) -> tuple[JsonMapping, str]:
    """Return the specification of the Ray cluster, and its path with a dot at its end."""
    cluster, where = document["spec"], "spec."
    for key in CLUSTER_KEYS[document["kind"]]:
        cluster, where = cluster.get(key, {}), f"{where}{key}."
    return cluster, where


def groups(cluster: JsonMapping, where: str) -> Iterator[tuple[str, JsonMapping]]:
    """Yield the head's group and the workers', each with its path (with a dot at its end)."""
    yield f"{where}headGroupSpec.", cluster["headGroupSpec"]
    for k, group in enumerate(cluster.get("workerGroupSpecs", [])):
        yield f"{where}workerGroupSpecs.{k}.", group


def containers(pod: JsonMapping, path: str) -> Iterator[tuple[str, JsonMapping]]:
    """Yield a pod's containers, each with its path (with a dot at its end)."""
    for kind in ("initContainers", "containers"):
        for k, container in enumerate(pod.get(kind, [])):
            yield f"{path}template.spec.{kind}.{k}.", container


def environment(pod: JsonMapping) -> dict[str, JsonMapping]:
    """Return the variables of a pod's first container, which runs Ray, by name."""
    return {entry["name"]: entry for container in pod.get("containers", [])[:1] for entry in container.get("env", [])}


def parse_number(text: JsonValue, default: float) -> float:
    """Return the number that a text of a manifest says; `default` if it is None or no number."""
    try:
        return default if text is None else float(text)
    except ValueError:
        return default


def head_is_idle(head: JsonMapping) -> bool:
    """Return True if Ray schedules no work on the head, because its group says that it has 0 CPUs."""
    cpus = head.get("rayStartParams", {}).get("num-cpus", head.get("resources", {}).get("CPU"))
    return parse_number(cpus, 1.0) == 0
