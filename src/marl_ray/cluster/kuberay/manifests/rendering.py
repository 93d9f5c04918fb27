"""From the short config to manifests: a RayCluster, or what has one inside, and what guards its pods."""

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
    CLUSTER_LABEL,
    CONTAINER_SECURITY,
    ROLE_LABEL,
    has_scaling_groups,
    pod_of,
    pull_secrets_of,
    resources_of,
    security_of,
)
from marl_ray.config.cluster import ClusterConfig, GroupConfig, JobConfig, NodeConfig
from marl_ray.json_types import JsonObject

SPOT_PRIORITY, FALLBACK_PRIORITY = 10, 1
"""The autoscaler tries the group on spot machines first, then the one that it falls back to."""
FALLBACK_SUFFIX = "-fallback"
IDLE_S = 300
"""Seconds that a pod stays while it is not needed: longer than a restart, so that one does not lose its nodes."""
HELPER_SIZE = NodeConfig(cpus=0.5, memory="512Mi")
"""Size of the autoscaler's container and of the pod that submits a job."""
SUBMITTER_RETRIES = 2
"""Further tries of the pod that submits a job."""
OPERATOR_LABELS = {"app.kubernetes.io/name": "kuberay-operator"}


def render(config: ClusterConfig) -> list[JsonObject]:
    """Return all manifests, the resource of KubeRay first."""
    resource = _resource(config).manifest()
    return [resource, *_budgets(config), _network_policy(config)]


def to_yaml(manifests: list[JsonObject]) -> str:
    """Return the manifests as documents of one file."""
    return "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=120) for manifest in manifests)


def _resource(config: ClusterConfig) -> Resource:
    by_clock = config.job is not None and config.job.schedule is not None  # what it makes carries no labels to queue by
    queue = {"kueue.x-k8s.io/queue-name": config.queue} if config.queue and not by_clock else {}
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
    clock = RayCronJobSpec(schedule=config.job.schedule, time_zone=config.job.time_zone, job_template=job)
    return Resource(kind="RayCronJob", metadata=metadata, spec=clock)


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
    """Return one group, or of a spot group two that offer Ray the same: the one on spot machines is taken first."""
    least, most = group.bounds
    parameters = {"resources": f"'{json.dumps(group.resources)}'"} if group.resources else {}
    market = {} if config.service is not None and not group.spot else {"ray.io/market-type": "on-demand"}

    def made(group_name: str, least: int, spot: bool, priority: int | None) -> WorkerGroup:
        return WorkerGroup(
            group_name=group_name,
            replicas=least if least == most else None,
            min_replicas=least,
            max_replicas=most,
            ray_start_params=parameters,
            labels={ROLE_LABEL: name} | ({"ray.io/market-type": "spot"} if spot else market),
            template=pod_of(config, group, name, spot),
            idle_timeout_seconds=group.idle_timeout_s if group.scales else None,
            priority=priority,
        )

    if not group.spot:
        return [made(name, least, False, None)]
    return [made(name, least, True, SPOT_PRIORITY), made(f"{name}{FALLBACK_SUFFIX}", 0, False, FALLBACK_PRIORITY)]


def _job_spec(config: ClusterConfig, job: JobConfig, cluster: RayClusterSpec) -> RayJobSpec:
    queued = config.queue is not None and job.schedule is None  # KubeRay gives what a clock makes no labels
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
        deletion_strategy=None if queued else {"deletionRules": _rules(job, has_scaling_groups(config))},
        runtime_env_yaml=yaml.safe_dump(job.runtime_env) if job.runtime_env else None,
    )


def _rules(job: JobConfig, scales: bool) -> list[JsonObject]:
    """Return the rules by which a job's parts are deleted.

    `Failed` stands for every failure, also for a deadline. Workers hold the machines that cost, the head
    has the logs.

    What a clock makes is taken away at last; any other RayJob stays and says what came of it.
    """
    succeeded, failed = {"jobStatus": "SUCCEEDED"}, {"jobDeploymentStatus": "Failed"}
    rules = [_rule("DeleteCluster", succeeded, job.keep_s)]
    if not scales:  # an autoscaler would make them again
        rules.append(_rule("DeleteWorkers", failed, 0))
    rules.append(_rule("DeleteCluster", failed, job.keep_failed_s))
    if job.schedule is not None:
        rules += [_rule("DeleteSelf", condition, job.keep_record_s) for condition in (succeeded, failed)]
    return rules


def _rule(policy: str, condition: dict[str, str], seconds: int) -> JsonObject:
    return {"policy": policy, "condition": {**condition, "ttlSeconds": seconds}}


def _submitter(config: ClusterConfig) -> PodTemplate:
    """Return KubeRay's submitter, confined like the others. It only talks to the head, so it gets nothing of theirs."""
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
    """Return a PodDisruptionBudget for each group of a gateway that has several pods.

    Drained machines thus take one of its pods at a time.

    KubeRay makes none. `maxUnavailable` would not work: Kubernetes knows the size of a Deployment, not of a
    RayCluster. Learners have none: a run that loses two of them at once starts again once, not twice.
    """
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{config.name}-{name}", "labels": {CLUSTER_LABEL: config.name}},
            "spec": {
                "minAvailable": least - 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {CLUSTER_LABEL: config.name, ROLE_LABEL: name}},
            },
        }
        for name, group in config.groups.items()
        if config.service is not None and (least := group.bounds[0]) > 1
    ]


def _network_policy(config: ClusterConfig) -> JsonObject:
    """Let the pods be reached by each other, KubeRay's operator, clients that carry a label, and Prometheus."""
    pods = {"podSelector": {"matchLabels": {CLUSTER_LABEL: config.name}}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR_LABELS}}
    clients = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"marl-ray/client": "true"}}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}

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
                {"from": [operator], "ports": ports(8265, 8000)},
                {"from": [clients], "ports": ports(8000, 8265)},
                {"from": [monitoring], "ports": ports(8080, 44217, 44227)},
            ],
        },
    }
