"""Pods of a Ray cluster: sizes, confinement, drains, and where they may run."""

from marl_ray.cluster.kuberay.manifests.models import Container, Metadata, PodSpec, PodTemplate
from marl_ray.config.cluster import DRAIN_VARIABLE, FILES_PATH, SPOOL_PATH, ClusterConfig, GroupConfig, NodeConfig
from marl_ray.json_types import JsonObject

CLUSTER_LABEL = "marl-ray/cluster"
"""Label of all that belongs to a cluster; KubeRay's own labels are for its Services."""
ROLE_LABEL = "marl-ray/role"
"""Label of a pod: `head`, `submitter`, or the name of its group, be it on spot machines or on others."""
PRE_STOP_S = 5
"""Seconds before Ray's drain, in which Services forget the pod."""
MARGIN_S = 25
"""Seconds after Ray's drain until Kubernetes kills the pod."""
SPOT_LABELS = (
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""Labels by which clouds mark machines that they may take away."""
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of every container. `/tmp`, which Ray and caches of libraries write, is a volume."""
_GPU_RESOURCE = "nvidia.com/gpu"
"""Name of NVIDIA's GPUs among a pod's resources."""
GCS_PORT, DASHBOARD_PORT, SERVE_PORT = 6379, 8265, 8000
"""Ports of Ray's control service, of its dashboard and of Ray Serve's proxy: Ray's defaults."""
NODE_METRICS_PORT, AUTOSCALER_METRICS_PORT, DASHBOARD_METRICS_PORT = 8080, 44217, 44227
"""Ports where Prometheus reads the metrics of every node, and on the head those of the autoscaler and of the dashboard: the
first is KubeRay's default, the others are Ray's."""
_SCRAPE_ANNOTATIONS = {"prometheus.io/scrape": "true", "prometheus.io/port": str(NODE_METRICS_PORT)}
"""Annotations by which Prometheus finds Ray's metrics agent."""
_KEEP_ANNOTATIONS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations by which autoscalers of machines leave a pod where it is."""
_SPOT_TOLERATIONS = [
    {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
    {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot", "effect": "NoSchedule"},
]
"""Tolerations of the taints by which clouds keep other pods off spot machines."""
VolumeMount = tuple[JsonObject, JsonObject]
"""A mount of a container, and the volume of its pod."""


def pod_of(config: ClusterConfig, node: NodeConfig, role: str, spot: bool = False) -> PodTemplate:
    """Return the pod of the head (`role` is `head`) or of a group."""
    is_head, scales = role == "head", has_scaling_groups(config)
    volumes = _volumes(config, node)
    spec = PodSpec(
        containers=[
            Container(
                name="ray-head" if is_head else "ray-worker",
                image=config.image,
                resources=resources_of(node),
                env=_environment(config),
                env_from=[{"secretRef": {"name": name}} for name in config.secrets] or None,
                ports=_ports(config, is_head),
                volume_mounts=[mount for mount, _ in volumes],
                security_context=CONTAINER_SECURITY,
                # Meanwhile the pod still answers, and Services forget it. Then SIGTERM makes Ray drain.
                lifecycle={"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
            )
        ],
        volumes=[volume for _, volume in volumes],
        security_context=security_of(config),
        service_account_name=config.service_account,
        # The autoscaler, in the head pod, asks the API server for workers; nothing else needs it.
        automount_service_account_token=is_head and scales,
        image_pull_secrets=pull_secrets_of(config),
        termination_grace_period_seconds=PRE_STOP_S + config.drain_s + MARGIN_S,
        restart_policy="Never" if scales else None,  # version 2 of the autoscaler wants it
        priority_class_name=config.priority_class,
        node_selector=node.node_selector or None,
        tolerations=_tolerations(config, node, spot) or None,
        affinity=_affinity(config, node, spot),
        topology_spread_constraints=None if is_head else _spread(config, role),
    )
    annotations = _SCRAPE_ANNOTATIONS | (_KEEP_ANNOTATIONS if _costs_a_restart(config, node, is_head) else {})
    return PodTemplate(
        metadata=Metadata(labels={CLUSTER_LABEL: config.name, ROLE_LABEL: role}, annotations=annotations), spec=spec
    )


def has_scaling_groups(config: ClusterConfig) -> bool:
    """Return True where the number of pods of a group may change."""
    return any(group.is_autoscaled for group in config.groups.values())


def resources_of(node: NodeConfig) -> dict[str, dict[str, str]]:
    """Return resources whose requests equal their limits, so that nothing else is promised the same memory."""
    cpus = str(int(node.cpus)) if node.cpus == int(node.cpus) else f"{round(1000 * node.cpus)}m"
    amounts = {"cpu": cpus, "memory": node.memory}
    if isinstance(node, GroupConfig) and node.gpus:
        amounts[_GPU_RESOURCE] = str(node.gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def security_of(config: ClusterConfig) -> JsonObject:
    """Return the security context of every pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": config.user,
        "runAsGroup": config.user,
        "fsGroup": config.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pull_secrets_of(config: ClusterConfig) -> list[dict[str, str]] | None:
    """Return the references to the config's secrets for pulling images, as a pod's spec has them; None without secrets."""
    return [{"name": name} for name in config.pull_secrets] or None


def _volumes(config: ClusterConfig, node: NodeConfig) -> list[VolumeMount]:
    memory = {"medium": "Memory"} | ({"sizeLimit": node.shm} if node.shm else {})
    # In memory, because Ray's object store would otherwise spill to disk.
    volumes = [_mount_of("shared-memory", "/dev/shm", {"emptyDir": memory})]
    for number, volume in enumerate(config.volumes):
        source: JsonObject = {"hostPath": {"path": volume.host, "type": "Directory"}}
        if volume.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": volume.claim}}
        volumes.append(_mount_of(f"storage-{number}" if number else "storage", volume.path, source))
    if config.files is not None:
        volumes.append(_mount_of("config", FILES_PATH, {"configMap": {"name": config.files}}, read_only=True))
    if config.service is not None:
        if config.service.api_keys_secret is not None:
            items = [{"key": "keys.yaml", "path": "keys.yaml"}]
            secret = {"secretName": config.service.api_keys_secret, "items": items}
            volumes.append(_mount_of("api-keys", FILES_PATH, {"secret": secret}, read_only=True))
        # Lives as long as the pod, so it survives a replica's crash.
        volumes.append(_mount_of("spool", SPOOL_PATH, {"emptyDir": {"sizeLimit": config.service.spool_size}}))
    return [*volumes, _mount_of("tmp", "/tmp", {"emptyDir": {"sizeLimit": "50Gi"}})]


def _mount_of(name: str, path: str, source: JsonObject, read_only: bool = False) -> VolumeMount:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {}), {"name": name} | source


def _environment(config: ClusterConfig) -> list[JsonObject]:
    variables = {
        "HOME": "/tmp",
        DRAIN_VARIABLE: str(config.drain_s),
        # How often a training run asks whether one of its nodes drains.
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",
    }
    return [{"name": name, "value": value} for name, value in (variables | config.env).items()]


def _ports(config: ClusterConfig, is_head: bool) -> list[JsonObject]:
    ports = {"gcs-server": GCS_PORT, "dashboard": DASHBOARD_PORT} if is_head else {}
    ports |= {"as-metrics": AUTOSCALER_METRICS_PORT, "dash-metrics": DASHBOARD_METRICS_PORT} if is_head else {}
    ports |= ({"serve": SERVE_PORT} if config.service is not None else {}) | {"metrics": NODE_METRICS_PORT}
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _costs_a_restart(config: ClusterConfig, node: NodeConfig, is_head: bool) -> bool:
    """Return True for a pod whose move to another machine costs a run a restart.

    Replicas of a gateway may move one by one.
    """
    is_fixed = isinstance(node, GroupConfig) and not node.is_autoscaled
    return config.service is None and (is_head or is_fixed)


def _runs_on_any_market(config: ClusterConfig, node: NodeConfig) -> bool:
    """Return True if a pod may run on machines of both kinds, spot and on-demand.

    Replicas of a gateway may be lost one by one; `spot` asks for one kind first.
    """
    return config.service is not None and isinstance(node, GroupConfig) and not node.spot


def _tolerations(config: ClusterConfig, node: NodeConfig, spot: bool) -> list[JsonObject]:
    gpus = isinstance(node, GroupConfig) and node.gpus
    return [
        *(_SPOT_TOLERATIONS if spot or _runs_on_any_market(config, node) else []),
        *([{"key": _GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}] if gpus else []),
        *node.tolerations,
    ]


def _affinity(config: ClusterConfig, node: NodeConfig, spot: bool) -> JsonObject | None:
    """Return the affinity to machines of the spot market, or to machines that stay, as those without any mark do.

    Return None for pods that may run on either.
    """
    if spot:
        terms = [
            {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in SPOT_LABELS
        ]
    elif _runs_on_any_market(config, node):
        return None
    else:
        marks = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT_LABELS]
        terms = [{"matchExpressions": marks}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _spread(config: ClusterConfig, role: str) -> list[JsonObject]:
    """Return the constraints that spread a group's pods over machines, so that a lost machine takes one pod.

    The pods of a gateway are spread over zones too; learners exchange too much data for several zones.
    """
    keys = ["kubernetes.io/hostname"] + (["topology.kubernetes.io/zone"] if config.service is not None else [])
    selector = {"matchLabels": {CLUSTER_LABEL: config.name, ROLE_LABEL: role}}
    common = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector}
    return [{"topologyKey": key} | common for key in keys]
