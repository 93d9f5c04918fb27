"""The short config of a Ray cluster on Kubernetes, and of what runs on it: a job, a service, or a job by the clock."""

import re
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from marl_ray.config.base import Config

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$")]
"""A name as Kubernetes takes it, short enough for what KubeRay appends."""
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|K|M|G|T)?$")]
"""An amount of memory, such as 8Gi."""
Seconds = Annotated[int, Field(ge=1)]


class NodeConfig(Config):
    """The size of a pod. Requests equal limits, so nothing else is promised its memory."""

    cpus: PositiveFloat = 2
    """CPUs of a pod."""
    memory: Quantity = "8Gi"
    """Memory of a pod."""
    shm: Quantity | None = None
    """Size of `/dev/shm`, where Ray keeps its objects; a third of the memory where not given. It counts as memory."""
    node_selector: dict[str, str] = {}
    """Labels that a machine must have to run the pod."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Tolerations of the pod, as Kubernetes writes them."""


class GroupConfig(NodeConfig):
    """Pods of one kind."""

    replicas: PositiveInt | tuple[Annotated[int, Field(ge=0)], PositiveInt] = 1
    """A fixed number, which comes up together; or least and most, between which Ray scales."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """NVIDIA GPUs of a pod."""
    spot: bool = False
    """Prefer machines that may be taken away, and fall back to others: two groups, the first with priority."""
    resources: dict[str, PositiveFloat] = {}
    """Custom resources that the group's nodes tell Ray of."""
    idle_timeout_s: Seconds = 300
    """Seconds that a pod stays while it is not needed; longer than a restart, so that one does not lose its nodes."""

    @model_validator(mode="after")
    def _check(self) -> "GroupConfig":
        if isinstance(self.replicas, tuple) and self.replicas[0] > self.replicas[1]:
            raise ValueError(f"replicas: expected least and most, got {list(self.replicas)}")
        if self.spot and not isinstance(self.replicas, tuple):
            raise ValueError("spot: expected replicas: [least, most], between which pods may come and go")
        return self


class RedisConfig(Config):
    """The Redis that keeps the head's state, so that a cluster outlives its head."""

    address: str
    """Such as redis://marl-ray-redis:6379."""
    password_secret: Name | None = None
    """Secret with the key `password`."""


class VolumeConfig(Config):
    """Storage that all pods share."""

    claim: Name
    """A PersistentVolumeClaim that many nodes may write."""
    path: Annotated[str, StringConstraints(pattern=r"^/[^:]+$")]
    """Absolute path at which the pods mount it."""


class JobConfig(Config):
    """A command that runs once on a cluster of its own."""

    entrypoint: str
    """Shell command that the job runs."""
    retries: Annotated[int, Field(ge=0)] = 0
    """Each is a new cluster and the same command: runs go on where their name and storage stay."""
    deadline_s: Seconds | None = None
    """From its beginning to its end, all tries together."""
    start_deadline_s: Seconds = 1800
    """Longest time for its cluster to come up."""
    keep_s: Annotated[int, Field(ge=0)] = 300
    """Time for which its cluster stays after a success."""
    keep_failed_s: Annotated[int, Field(ge=0)] = 3600
    """Time for which its cluster stays after a failure, so that somebody can look into it."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of the job, such as `env_vars` or `working_dir`."""
    schedule: str | None = None
    """Five fields of cron: a job by the clock, with a cluster of its own each time."""
    time_zone: str | None = None
    """Time zone of `schedule`, such as `Europe/Berlin`; that of KubeRay's operator when not given."""

    @model_validator(mode="after")
    def _check(self) -> "JobConfig":
        if self.schedule is not None and not re.fullmatch(r"\S+( \S+){4}", self.schedule):
            raise ValueError(f"schedule: expected five fields of cron, got {self.schedule!r}")
        if self.time_zone is not None and self.schedule is None:
            raise ValueError("time_zone: expected beside schedule")
        return self


class ServiceConfig(Config):
    """A gateway that stays."""

    serve: dict[str, Any]
    """The Serve config, as `serve deploy` takes it."""
    delete_old_after_s: Seconds = 120
    """Time for which a replaced cluster stays; longer than its pods take to end."""


class ClusterConfig(Config):
    """A Ray cluster on Kubernetes."""

    name: Name
    """Name of the cluster, and the first part of the names of its resources."""
    image: str
    """With marl-ray installed, the same version as here."""
    ray_version: str = "2.60.0"
    """Version of Ray in the image."""
    head: NodeConfig = NodeConfig()
    """It runs no user's work, on machines that are not taken away."""
    groups: dict[Name, GroupConfig] = Field(min_length=1)
    token: bool = True
    """Guard dashboard and jobs by a token, which KubeRay makes."""
    redis: RedisConfig | None = None
    queue: Name | None = None
    """Kueue's local queue: all pods begin together, when there is room."""
    priority_class: Name | None = None
    """Priority class of the pods."""
    service_account: Name | None = None
    """Service account of the pods."""
    pull_secrets: tuple[Name, ...] = ()
    """Secrets with which the image is pulled."""
    env: dict[str, str] = {}
    """Environment variables of all pods."""
    secrets: tuple[Name, ...] = ()
    """Secrets whose keys become environment variables, such as those of S3."""
    volumes: tuple[VolumeConfig, ...] = ()
    files: Name | None = None
    """A ConfigMap whose keys all pods see as files in /etc/marl-ray/files."""
    user: Annotated[int, Field(ge=1)] = 1000
    """Number of the user in the image; root is refused."""
    drain_s: Seconds = 60
    """Time in which a pod that ends may finish its work; Kubernetes waits 30 s longer."""
    job: JobConfig | None = None
    service: ServiceConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.job is not None and self.service is not None:
            raise ValueError("job, service: expected one of them at most")
        longest = max(map(len, self.groups))
        if any(group.spot for group in self.groups.values()) and longest > 36:
            raise ValueError("groups: expected names of at most 36 characters where a group is spot")
        return self
