"""Pods of a Ray cluster: sizes, confinement, drains, and where they may run."""

import re
from typing import Any

from marl_ray.cluster.kuberay.manifests.models import Container, Metadata, PodSpec, PodTemplate
from marl_ray.config.cluster import ClusterConfig, GroupConfig, NodeConfig

LABEL = "marl-ray/cluster"
"""Label of all pods of a cluster; KubeRay's own labels are for its Services."""
ROLE = "marl-ray/group"
MARGIN_S = 30
"""Between the end of Ray's drain and the moment at which Kubernetes kills a pod."""
SPOT = (
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""Labels by which clouds mark machines that they may take away."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 1024 ** (number + 1) for number, letter in enumerate("KMGT")
}
FOLDERS = {"tmp": "/tmp", "run": "/var/run/marl-ray"}
"""Folders that a pod may write, as its image is read-only: Ray's sessions, caches of libraries, spools."""
FILES = "/etc/marl-ray/files"
"""Folder of a submission's files in its pods."""


def pod_of(config: ClusterConfig, node: NodeConfig, group: str, spot: bool = False) -> PodTemplate:
    """The pod of the head (`group` is `head`) or of a group."""
    head, scales = group == "head", isinstance(node, GroupConfig) and isinstance(node.replicas, tuple)
    container = Container(
        name="ray-head" if head else "ray-worker",
        image=config.image,
        resources=_resources(node),
        env=_environment(config),
        env_from=[{"secretRef": {"name": name}} for name in config.secrets] or None,
        ports=_ports(head),
        volume_mounts=[
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": name, "mountPath": path} for name, path in FOLDERS.items()),
            *({"name": volume.claim, "mountPath": volume.path} for volume in config.volumes),
            *([{"name": "files", "mountPath": FILES, "readOnly": True}] if config.files is not None else []),
        ],
        security_context={
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # Without it a pod that ends is cut off before it has left the Service's endpoints.
        lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}},
    )
    spec = PodSpec(
        containers=[container],
        volumes=[
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shm(node)}},
            *({"name": name, "emptyDir": {}} for name in FOLDERS),
            *({"name": one.claim, "persistentVolumeClaim": {"claimName": one.claim}} for one in config.volumes),
            *([{"name": "files", "configMap": {"name": config.files}}] if config.files is not None else []),
        ],
        security_context={
            "runAsNonRoot": True,
            "runAsUser": config.user,
            "fsGroup": config.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        service_account_name=config.service_account,
        automount_service_account_token=None if head and any_scales(config) else False,
        image_pull_secrets=[{"name": name} for name in config.pull_secrets] or None,
        termination_grace_period_seconds=config.drain_s + MARGIN_S,
        restart_policy="Never" if any_scales(config) else None,  # version 2 of the autoscaler wants it
        priority_class_name=config.priority_class,
        node_selector=node.node_selector or None,
        tolerations=[*node.tolerations] + ([_TOLERATION] if spot else []) or None,
        affinity=_affinity(head or not (scales and spot), spot),
        topology_spread_constraints=None if head else _spread(config, group),
    )
    metadata = Metadata(labels={LABEL: config.name, ROLE: group}, annotations=_SCRAPED | (_KEPT if not spot else {}))
    return PodTemplate(metadata=metadata, spec=spec)


def any_scales(config: ClusterConfig) -> bool:
    """True where the number of pods of a group may change."""
    return any(isinstance(group.replicas, tuple) for group in config.groups.values())


def bytes_of(quantity: str) -> int:
    """Bytes of an amount of memory, such as 8Gi."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match is not None
    return int(float(match[1]) * _UNITS[match[2]])


_SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080"}
"""Ray's metrics agent."""
_KEPT = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Whoever tidies up machines leaves these pods alone: they end with their cluster."""
_TOLERATION = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}


def _resources(node: NodeConfig) -> dict[str, dict[str, str]]:
    amounts = {"cpu": f"{node.cpus:g}", "memory": node.memory}
    if isinstance(node, GroupConfig) and node.gpus:
        amounts["nvidia.com/gpu"] = str(node.gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def _shm(node: NodeConfig) -> str:
    return node.shm or f"{bytes_of(node.memory) // 3 // 2**20}Mi"


def _environment(config: ClusterConfig) -> list[dict[str, Any]]:
    own = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(config.drain_s), "HOME": FOLDERS["tmp"]} | config.env
    return [{"name": name, "value": value} for name, value in own.items()]


def _ports(head: bool) -> list[dict[str, Any]]:
    ports = {"serve": 8000, "metrics": 8080}
    if head:
        ports |= {"gcs-server": 6379, "dashboard": 8265}
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _affinity(stays: bool, spot: bool) -> dict[str, Any] | None:
    """Machines that stay, or machines of the spot market; machines without any mark are of the first kind."""
    if spot:
        terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in SPOT]
    elif stays:
        marks = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT]
        terms = [{"matchExpressions": marks}]
    else:
        return None
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _spread(config: ClusterConfig, group: str) -> list[dict[str, Any]]:
    """Over machines and zones where there is a choice, so that one that is lost takes few pods."""
    selector = {"matchLabels": {LABEL: config.name, ROLE: group}}
    keys = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    common = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector}
    return [{"topologyKey": key} | common for key in keys]
