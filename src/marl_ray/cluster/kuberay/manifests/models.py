"""The fields of KubeRay's resources (v1, release 1.7) that are written here; others are refused."""

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from marl_ray.json_types import JsonObject


class _Part(BaseModel):
    """A part of a manifest: snake_case here, camelCase there."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Metadata(_Part):
    """The name, the labels and the annotations of an object or a pod."""

    name: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Container(_Part):
    """One container of a pod."""

    name: str
    image: str
    resources: dict[str, dict[str, str]]
    env: list[JsonObject] | None = None
    env_from: list[JsonObject] | None = None
    ports: list[JsonObject] | None = None
    volume_mounts: list[JsonObject] | None = None
    security_context: JsonObject | None = None
    lifecycle: JsonObject | None = None
    command: list[str] | None = None


class PodSpec(_Part):
    """The specification of a pod."""

    containers: list[Container]
    volumes: list[JsonObject] | None = None
    security_context: JsonObject | None = None
    service_account_name: str | None = None
    automount_service_account_token: bool | None = None
    image_pull_secrets: list[dict[str, str]] | None = None
    termination_grace_period_seconds: int | None = None
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None
    priority_class_name: str | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[JsonObject] | None = None
    affinity: JsonObject | None = None
    topology_spread_constraints: list[JsonObject] | None = None


class PodTemplate(_Part):
    """The pod of which a group has copies."""

    metadata: Metadata
    spec: PodSpec


class HeadGroup(_Part):
    """The head of a Ray cluster, which is one pod."""

    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(_Part):
    """Pods of one kind."""

    group_name: str
    replicas: int | None = None
    """None where the autoscaler has the say: what is applied again must not put the number back."""
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    labels: dict[str, str]
    """Labels that Ray's scheduler knows the nodes by."""
    template: PodTemplate
    idle_timeout_seconds: int | None = None
    priority: int | None = None
    """The autoscaler takes groups of a higher number first (Ray 2.56 and later)."""


class FaultTolerance(_Part):
    """The Redis that keeps the state of the cluster's head (`gcsFaultToleranceOptions`)."""

    redis_address: str
    redis_password: JsonObject | None = None


class RayClusterSpec(_Part):
    """A Ray cluster, by itself or inside of a job or a service."""

    ray_version: str
    upgrade_strategy: dict[str, Literal["Recreate", "None"]] | None = None
    """Only a cluster that stands alone has one."""
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]
    auth_options: JsonObject | None = None
    enable_in_tree_autoscaling: bool | None = None
    autoscaler_options: JsonObject | None = None
    gcs_fault_tolerance_options: FaultTolerance | None = None


class RayJobSpec(_Part):
    """An entrypoint and the cluster that it runs on."""

    entrypoint: str
    ray_cluster_spec: RayClusterSpec
    submission_mode: Literal["K8sJobMode"] = "K8sJobMode"
    submitter_pod_template: PodTemplate
    submitter_config: dict[str, int]
    backoff_limit: int
    active_deadline_seconds: int | None = None
    pre_running_deadline_seconds: int | None = None
    shutdown_after_job_finishes: bool | None = None
    ttl_seconds_after_finished: int | None = None
    deletion_strategy: JsonObject | None = None
    runtime_env_yaml: str | None = None

    model_config = ConfigDict(
        extra="forbid",
        alias_generator=lambda name: "runtimeEnvYAML" if name == "runtime_env_yaml" else to_camel(name),
        populate_by_name=True,
    )


class RayServiceSpec(_Part):
    """A Serve config and the cluster that it is deployed on."""

    serve_config_v2: str
    ray_cluster_config: RayClusterSpec
    upgrade_strategy: dict[str, Literal["NewCluster", "None"]]
    ray_cluster_deletion_delay_seconds: int
    exclude_head_pod_from_serve_svc: bool


class RayCronJobSpec(_Part):
    """A job by the clock."""

    schedule: str
    time_zone: str | None = None
    job_template: RayJobSpec


class Resource(_Part):
    """One of KubeRay's resources."""

    api_version: Literal["ray.io/v1"] = "ray.io/v1"
    kind: Literal["RayCluster", "RayCronJob", "RayJob", "RayService"]
    metadata: Metadata
    spec: RayClusterSpec | RayCronJobSpec | RayJobSpec | RayServiceSpec

    def manifest(self) -> JsonObject:
        """Return plain data as the API takes it."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
