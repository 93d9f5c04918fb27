"""From the short config to manifests: a RayCluster, or what has one inside, and what guards its pods."""

import json
from typing import Any, Literal

import yaml

from marl_ray.cluster.kuberay.manifests.models import (
    FaultTolerance,
    HeadGroup,
    Metadata,
    PodTemplate,
    RayClusterSpec,
    RayCronJobSpec,
    RayJobSpec,
    RayServiceSpec,
    Resource,
    WorkerGroup,
)
from marl_ray.cluster.kuberay.manifests.pods import LABEL, ROLE, any_scales, pod_of
from marl_ray.config.cluster import ClusterConfig, GroupConfig, JobConfig

SPOT_PRIORITY = 10
"""Priority of a group on spot machines; the same group on others has 0."""
SPOT_SUFFIX = "-spot"
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}


def render(config: ClusterConfig) -> list[dict[str, Any]]:
    """All manifests, the resource of KubeRay first."""
    resource = _resource(config).manifest()
    return [resource, *_budgets(config), _network_policy(config)]


def to_yaml(manifests: list[dict[str, Any]]) -> str:
    """Manifests as documents of one file."""
    return "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=120) for manifest in manifests)


def _resource(config: ClusterConfig) -> Resource:
    labels = {LABEL: config.name} | ({"kueue.x-k8s.io/queue-name": config.queue} if config.queue else {})
    metadata, cluster = Metadata(name=config.name, labels=labels), cluster_spec(config)
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
    """The Ray cluster of a config."""
    groups = [group for name, one in config.groups.items() for group in _groups(config, name, one)]
    scales = any_scales(config)
    redis = None
    if config.redis is not None:
        reference = {"secretKeyRef": {"name": config.redis.password_secret, "key": "password"}}
        password = {"valueFrom": reference} if config.redis.password_secret else None
        redis = FaultTolerance(redis_address=config.redis.address, redis_password=password)
    return RayClusterSpec(
        ray_version=config.ray_version,
        auth_options={"mode": "token"} if config.token else None,
        enable_in_tree_autoscaling=True if scales else None,
        autoscaler_options={"version": "v2"} if scales else None,
        gcs_fault_tolerance_options=redis,
        head_group_spec=HeadGroup(ray_start_params={"num-cpus": "0"}, template=pod_of(config, config.head, "head")),
        worker_group_specs=groups,
    )


def _groups(config: ClusterConfig, name: str, group: GroupConfig) -> list[WorkerGroup]:
    """One group, or of a spot group two that offer Ray the same: the one on spot machines is taken first."""
    least, most = group.replicas if isinstance(group.replicas, tuple) else (group.replicas, group.replicas)
    parameters = {"resources": f"'{json.dumps(group.resources)}'"} if group.resources else {}
    scales = isinstance(group.replicas, tuple)

    def made(name: str, least: int, template: PodTemplate, priority: int | None) -> WorkerGroup:
        return WorkerGroup(
            group_name=name,
            replicas=least,
            min_replicas=least,
            max_replicas=most,
            ray_start_params=parameters,
            template=template,
            idle_timeout_seconds=group.idle_timeout_s if scales else None,
            priority=priority,
        )

    if not group.spot:
        return [made(name, least, pod_of(config, group, name), None)]
    spot = made(f"{name}{SPOT_SUFFIX}", least, pod_of(config, group, f"{name}{SPOT_SUFFIX}", spot=True), SPOT_PRIORITY)
    return [spot, made(name, 0, pod_of(config, group, name), 0)]


def _job_spec(config: ClusterConfig, job: JobConfig, cluster: RayClusterSpec) -> RayJobSpec:
    return RayJobSpec(
        entrypoint=job.entrypoint,
        ray_cluster_spec=cluster,
        submitter_pod_template=_submitter(config),
        backoff_limit=job.retries,
        active_deadline_seconds=job.deadline_s,
        pre_running_deadline_seconds=job.start_deadline_s,
        # A queue suspends jobs, which KubeRay allows only for those that shut their cluster down themselves.
        shutdown_after_job_finishes=True if config.queue else None,
        ttl_seconds_after_finished=job.keep_s if config.queue else None,
        deletion_strategy=None if config.queue else {"deletionRules": _rules(job)},
        runtime_env_yaml=yaml.safe_dump(job.runtime_env) if job.runtime_env else None,
    )


def _rules(job: JobConfig) -> list[dict[str, Any]]:
    return [
        _rule("jobStatus", "SUCCEEDED", job.keep_s),
        _rule("jobStatus", "FAILED", job.keep_failed_s),
        _rule("jobDeploymentStatus", "Failed", job.keep_failed_s),
    ]


def _rule(what: Literal["jobStatus", "jobDeploymentStatus"], value: str, seconds: int) -> dict[str, Any]:
    """A cluster goes so long after its job's end. The RayJob itself stays and says what came of it."""
    return {"policy": "DeleteCluster", "condition": {what: value, "ttlSeconds": seconds}}


def _submitter(config: ClusterConfig) -> PodTemplate:
    """KubeRay's submitter, confined like the others."""
    template = pod_of(config, config.head, "head").model_copy(deep=True)
    [container] = template.spec.containers
    amounts = {"cpu": "500m", "memory": "512Mi"}
    container.name, container.resources = "ray-job-submitter", {"requests": amounts, "limits": dict(amounts)}
    container.ports = container.lifecycle = None
    template.spec.restart_policy, template.spec.affinity = "Never", None
    template.spec.automount_service_account_token = False
    template.metadata = Metadata(labels={LABEL: config.name, ROLE: "submitter"})
    return template


def _budgets(config: ClusterConfig) -> list[dict[str, Any]]:
    """A PodDisruptionBudget for each group of several pods that stay: drained machines take one of them at a time.

    KubeRay makes none. `maxUnavailable` would not work: Kubernetes knows the size of a Deployment, not of a RayCluster.
    """
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{config.name}-{name}", "labels": {LABEL: config.name}},
            "spec": {"minAvailable": least - 1, "selector": {"matchLabels": {LABEL: config.name, ROLE: name}}},
        }
        for name, group in config.groups.items()
        if (least := group.replicas[0] if isinstance(group.replicas, tuple) else group.replicas) > 1
    ]


def _network_policy(config: ClusterConfig) -> dict[str, Any]:
    """The pods are reached by each other, KubeRay's operator, clients that carry a label, and Prometheus."""
    own = {"podSelector": {"matchLabels": {LABEL: config.name}}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
    clients = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"marl-ray/client": "true"}}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}

    def ports(*numbers: int) -> list[dict[str, Any]]:
        return [{"port": number, "protocol": "TCP"} for number in numbers]

    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": config.name, "labels": {LABEL: config.name}},
        "spec": {
            "podSelector": own["podSelector"],
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [operator], "ports": ports(8265, 8000)},
                {"from": [clients], "ports": ports(8000, 8265)},
                {"from": [monitoring], "ports": ports(8080)},
            ],
        },
    }
