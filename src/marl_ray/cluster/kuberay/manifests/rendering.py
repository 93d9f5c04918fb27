"""Renders the short config as manifests: a resource of KubeRay, and the policies of its pods."""

import json

import yaml

from marl_ray.cluster.kuberay.manifests.models import (
    Container,
    FaultTolerance,
    HeadGroup,
    Metadata,
    PodSpec,
    PodTemplate,
    RayClusterSpec,
    RayCronJobSpec,
    RayJobSpec,
    RayServiceSpec,
    Resource,
    WorkerGroup,
)
from marl_ray.cluster.kuberay.manifests.pods import (
    AUTOSCALER_METRICS_PORT,
    CLUSTER_LABEL,
    CONTAINER_SECURITY,
    DASHBOARD_METRICS_PORT,
    DASHBOARD_PORT,
    NODE_METRICS_PORT,
    ROLE_LABEL,
    SERVE_PORT,
    has_scaling_groups,
    pod_of,
    pull_secrets_of,
    resources_of,
    security_of,
)
from marl_ray.config.cluster import ClusterConfig, GroupConfig, JobConfig, NodeConfig
from marl_ray.json_types import JsonObject

SPOT_PRIORITY, FALLBACK_PRIORITY = 10, 1
"""Priorities of the two groups of a spot group: the autoscaler tries the greater one first, and falls back to the other."""
FALLBACK_SUFFIX = "-fallback"
"""End of the name of the group that a spot group falls back to."""
IDLE_S = 300
"""Seconds that a pod stays while it is not needed: longer than a restart, so that one does not lose its nodes."""
HELPER_SIZE = NodeConfig(cpus=0.5, memory="512Mi")
"""Size of the autoscaler's container and of the pod that submits a job."""
SUBMITTER_RETRIES = 2
"""Further tries of the pod that submits a job."""
OPERATOR_LABELS = {"app.kubernetes.io/name": "kuberay-operator"}
"""Labels of the operator's pod, as KubeRay's chart gives them."""


def render(config: ClusterConfig) -> list[JsonObject]:
    """Return all manifests, the resource of KubeRay first."""
    resource = _resource(config).manifest()
    return [resource, *_budgets(config), _network_policy(config)]


def to_yaml(manifests: list[JsonObject]) -> str:
    """Return the manifests as documents of one file."""
    return "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=120) for manifest in manifests)


def _resource(config: ClusterConfig) -> Resource:
    has_schedule = config.job is not None and config.job.schedule is not None  # its RayJobs carry no labels to queue by
    queue = {"kueue.x-k8s.io/queue-name": config.queue} if config.queue and not has_schedule else {}
    # Kueue refuses what scales unless it is marked so, and a marked service could not be upgraded.
    elastic = (
        {"kueue.x-k8s.io/elastic-job": "true"} if queue and has_scaling_groups(config) and not config.service else None
    )
    metadata = Metadata(name=config.name, labels={CLUSTER_LABEL: config.name} | queue, annotations=elastic)
    cluster = cluster_spec(config)
    if config.service is not None:
        service = RayServiceSpec(
            serve_config_v2=yaml.safe_dump(config.service.serve, sort_keys=False),
            ray_cluster_config=cluster,
            upgrade_strategy={"type": "NewCluster"},
            ray_cluster_deletion_delay_seconds=config.service.delete_old_after_s,
            exclude_head_pod_from_serve_svc=True,
        )
        return Resource(kind="RayService", metadata=metadata, spec=service)
    if config.job is None:
        return Resource(kind="RayCluster", metadata=metadata, spec=cluster)
    job = _job_spec(config, config.job, cluster)
    if config.job.schedule is None:
        return Resource(kind="RayJob", metadata=metadata, spec=job)
    cron_job = RayCronJobSpec(schedule=config.job.schedule, time_zone=config.job.time_zone, job_template=job)
    return Resource(kind="RayCronJob", metadata=metadata, spec=cron_job)


def cluster_spec(config: ClusterConfig) -> RayClusterSpec:
    """Return the Ray cluster of a config."""
    groups = [group for name, node_group in config.groups.items() for group in _groups(config, name, node_group)]
    scales = has_scaling_groups(config)
    redis = None
    if config.redis is not None:
        reference = {"secretKeyRef": {"name": config.redis.password_secret, "key": "password"}}
        password = {"valueFrom": reference} if config.redis.password_secret else None
        redis = FaultTolerance(redis_address=config.redis.address, redis_password=password)
    return RayClusterSpec(
        ray_version=config.ray_version,
        # A changed specification does not end the running cluster and all its work.
        upgrade_strategy={"type": "None"} if config.job is None and config.service is None else None,
        auth_options={"mode": "token"} if config.token else {"mode": "disabled"},
        enable_in_tree_autoscaling=True if scales else None,
        autoscaler_options=_autoscaler() if scales else None,
        gcs_fault_tolerance_options=redis,
        head_group_spec=HeadGroup(ray_start_params={"num-cpus": "0"}, template=pod_of(config, config.head, "head")),
        worker_group_specs=groups,
    )


def _autoscaler() -> JsonObject:
    """Return the autoscaler's options.

    KubeRay puts it into the head pod, where what it shares with Ray lies in `/tmp/ray`.
    """
    return {
        "version": "v2",
        "idleTimeoutSeconds": IDLE_S,
        "resources": resources_of(HELPER_SIZE),
        "securityContext": CONTAINER_SECURITY,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _groups(config: ClusterConfig, name: str, group: GroupConfig) -> list[WorkerGroup]:
    """Return one group, or for a spot group two that offer Ray the same resources, the one on spot machines first."""
    min_pods, max_pods = group.bounds
    parameters = {"resources": f"'{json.dumps(group.resources)}'"} if group.resources else {}
    market = {} if config.service is not None and not group.spot else {"ray.io/market-type": "on-demand"}

    def worker_group(group_name: str, min_replicas: int, spot: bool, priority: int | None) -> WorkerGroup:
        return WorkerGroup(
            group_name=group_name,
            replicas=min_replicas if min_replicas == max_pods else None,
            min_replicas=min_replicas,
            max_replicas=max_pods,
            ray_start_params=parameters,
            labels={ROLE_LABEL: name} | ({"ray.io/market-type": "spot"} if spot else market),
            template=pod_of(config, group, name, spot),
            idle_timeout_seconds=group.idle_timeout_s if group.is_autoscaled else None,
            priority=priority,
        )

    if not group.spot:
        return [worker_group(name, min_pods, False, None)]
    return [
        worker_group(name, min_pods, True, SPOT_PRIORITY),
        worker_group(f"{name}{FALLBACK_SUFFIX}", 0, False, FALLBACK_PRIORITY),
    ]


def _job_spec(config: ClusterConfig, job: JobConfig, cluster: RayClusterSpec) -> RayJobSpec:
    queued = config.queue is not None and job.schedule is None  # the RayJobs of a schedule get no labels
    return RayJobSpec(
        entrypoint=job.entrypoint,
        ray_cluster_spec=cluster,
        submitter_pod_template=_submitter(config),
        submitter_config={"backoffLimit": SUBMITTER_RETRIES},
        backoff_limit=job.retries,
        active_deadline_seconds=job.deadline_s,
        pre_running_deadline_seconds=job.start_deadline_s,
        # A queue suspends jobs, which KubeRay allows only for those that shut their cluster down themselves.
        shutdown_after_job_finishes=True if queued else None,
        ttl_seconds_after_finished=job.keep_s if queued else None,
        deletion_strategy=None if queued else {"deletionRules": _deletion_rules(job, has_scaling_groups(config))},
        runtime_env_yaml=yaml.safe_dump(job.runtime_env) if job.runtime_env else None,
    )


def _deletion_rules(job: JobConfig, scales: bool) -> list[JsonObject]:
    """Return the rules by which a job's parts are deleted.

    `Failed` stands for every failure, also for a deadline. After one the workers, whose machines cost most, go at once,
    and the head, which has the logs, later. A RayJob of a schedule is itself deleted at last; any other stays.
    """
    succeeded, failed = {"jobStatus": "SUCCEEDED"}, {"jobDeploymentStatus": "Failed"}
    rules = [_deletion_rule("DeleteCluster", succeeded, job.keep_s)]
    if not scales:  # an autoscaler would make them again
        rules.append(_deletion_rule("DeleteWorkers", failed, 0))
    rules.append(_deletion_rule("DeleteCluster", failed, job.keep_failed_s))
    if job.schedule is not None:
        rules += [_deletion_rule("DeleteSelf", condition, job.keep_record_s) for condition in (succeeded, failed)]
    return rules


def _deletion_rule(policy: str, condition: dict[str, str], seconds: int) -> JsonObject:
    return {"policy": policy, "condition": {**condition, "ttlSeconds": seconds}}


def _submitter(config: ClusterConfig) -> PodTemplate:
    """Return the pod in which KubeRay submits the job: confined like the others, without their secrets and volumes."""
    container = Container(
        name="ray-job-submitter",  # without a command: KubeRay gives it
        image=config.image,
        resources=resources_of(HELPER_SIZE),
        env=[{"name": "HOME", "value": "/tmp"}],
        volume_mounts=[{"name": "tmp", "mountPath": "/tmp"}],
        security_context=CONTAINER_SECURITY,
    )
    spec = PodSpec(
        containers=[container],
        volumes=[{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
        security_context=security_of(config),
        automount_service_account_token=False,
        image_pull_secrets=pull_secrets_of(config),
        restart_policy="Never",
    )
    return PodTemplate(metadata=Metadata(labels={CLUSTER_LABEL: config.name, ROLE_LABEL: "submitter"}), spec=spec)


def _budgets(config: ClusterConfig) -> list[JsonObject]:
    """Return a PodDisruptionBudget for each group of a gateway that has several pods; KubeRay makes none.

    With it the drain of machines takes one pod of the group at a time. `maxUnavailable` would not work: Kubernetes knows
    the size of a Deployment, not of a RayCluster. Learners have no budget: a run that loses two of them at once starts
    again once, not twice.
    """
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{config.name}-{name}", "labels": {CLUSTER_LABEL: config.name}},
            "spec": {
                "minAvailable": min_pods - 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {CLUSTER_LABEL: config.name, ROLE_LABEL: name}},
            },
        }
        for name, group in config.groups.items()
        if config.service is not None and (min_pods := group.bounds[0]) > 1
    ]


def _network_policy(config: ClusterConfig) -> JsonObject:
    """Return the policy by which each other, KubeRay's operator, labelled clients and Prometheus reach the pods."""
    pods = {"podSelector": {"matchLabels": {CLUSTER_LABEL: config.name}}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR_LABELS}}
    clients = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"marl-ray/client": "true"}}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}

    metrics_ports = (NODE_METRICS_PORT, AUTOSCALER_METRICS_PORT, DASHBOARD_METRICS_PORT)

    def ports(*numbers: int) -> list[JsonObject]:
        return [{"port": number, "protocol": "TCP"} for number in numbers]

    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": config.name, "labels": {CLUSTER_LABEL: config.name}},
        "spec": {
            "podSelector": pods["podSelector"],
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [pods]},
                {"from": [operator], "ports": ports(DASHBOARD_PORT, SERVE_PORT)},
                {"from": [clients], "ports": ports(SERVE_PORT, DASHBOARD_PORT)},
                {"from": [monitoring], "ports": ports(*metrics_ports)},
            ],
        },
    }
