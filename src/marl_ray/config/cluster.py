"""The short config of a Ray cluster on Kubernetes, and of the job or service that runs on it."""

from typing import Annotated

from pydantic import Field, model_validator

from marl_ray.config.base import REDIS, Config
from marl_ray.config.kubernetes import (
    MAX_NUMBER,
    AbsolutePath,
    Command,
    Count,
    Image,
    Name,
    Positive,
    Quantity,
    Queue,
    RayResource,
    Reference,
    Seconds,
    Variable,
    Version,
    is_schedule,
    is_time_zone,
)
from marl_ray.json_types import JsonObject

FILES_PATH = "/etc/marl-ray"
"""Folder of a submission's files, or of a gateway's keys, in its pods."""
SPOOL_PATH = "/var/lib/marl-ray/spool"
"""Folder of a gateway's exposures while their database is away."""
RESERVED_PATHS = ("/dev/shm", "/tmp", FILES_PATH, SPOOL_PATH)
"""Folders of every pod that are volumes of its own; Kubernetes makes no pod that mounts two at one path."""
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Ray's variable for the seconds in which a node that ends may finish its work."""
RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray counts by itself."""
MAX_CRON_NAME_LENGTH = 37
"""Maximum number of characters of the name of a RayCronJob, to which KubeRay appends the time."""
MAX_SPOT_NAME_LENGTH = 36
"""Maximum number of characters of the name of a spot group, so that the group it falls back to has a valid name too."""


class NodeConfig(Config):
    """The size of a pod. Requests equal limits, so nothing else is promised its memory."""

    cpus: Annotated[float, Field(ge=0.001, le=MAX_NUMBER, allow_inf_nan=False)] = 2
    """CPUs of a pod, of which Ray counts the next whole number."""
    memory: Quantity = "8Gi"
    """Memory of a pod."""
    shm: Quantity | None = None
    """Bound of `/dev/shm`, where Ray keeps its objects. It counts as memory; when not given, the pod's memory bounds it."""
    node_selector: dict[str, str] = {}
    """Labels that a machine must have to run the pod."""
    tolerations: tuple[JsonObject, ...] = ()
    """Tolerations of the pod, as Kubernetes writes them."""


class GroupConfig(NodeConfig):
    """Pods of one kind."""

    replicas: Positive | tuple[Count, Positive] = 1
    """Number of pods: a fixed one, which come up together; or least and most, between which Ray scales."""
    gpus: Count = 0
    """NVIDIA GPUs of a pod."""
    spot: bool = False
    """Prefer spot machines and fall back to others: the group becomes two, the first with priority."""
    resources: dict[RayResource, Positive] = {}
    """Custom resources that the group's nodes tell Ray of; Ray's autoscaler takes whole numbers alone."""
    idle_timeout_s: Seconds | None = None
    """Seconds that a pod stays while nothing needs it; 300 when not given, which is longer than a restart takes."""

    @property
    def is_autoscaled(self) -> bool:
        """True if Ray's autoscaler decides how many pods there are."""
        return isinstance(self.replicas, tuple)

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of pods."""
        return self.replicas if isinstance(self.replicas, tuple) else (self.replicas, self.replicas)

    @model_validator(mode="after")
    def _check(self) -> "GroupConfig":
        low, high = self.bounds
        if low > high:
            raise ValueError(f"replicas: expected least and most, got {[low, high]}")
        if self.spot and not self.is_autoscaled:
            raise ValueError("spot: expected replicas: [least, most], between which pods may come and go")
        resource = next((name for name in RAY_RESOURCES if name in self.resources), None)
        if resource is not None:
            raise ValueError(f"resources: expected another name than {resource}, which Ray counts by itself")
        return self


class RedisConfig(Config):
    """The Redis that keeps the head's state, so that a cluster outlives its head."""

    address: Annotated[str, Field(pattern=REDIS)]
    """Address of the Redis, such as redis://marl-ray-redis:6379; the password is in a Secret."""
    password_secret: Reference | None = None
    """Secret with the key `password`."""


class VolumeConfig(Config):
    """Storage that all pods share."""

    claim: Reference | None = None
    """A PersistentVolumeClaim that many nodes may write."""
    host: AbsolutePath | None = None
    """In place of `claim`: a folder of every machine, such as a mounted network file system."""
    path: AbsolutePath
    """Path at which pods see it."""

    @model_validator(mode="after")
    def _check(self) -> "VolumeConfig":
        if (self.claim is None) == (self.host is None):
            raise ValueError("claim, host: expected one of them")
        return self


class JobConfig(Config):
    """A command that runs once on a cluster of its own."""

    entrypoint: Command
    """Shell command that the job runs."""
    retries: Count = 2
    """Number of further tries. Each is a new cluster and the same command; a run continues if its name and storage stay."""
    deadline_s: Seconds = 86_400
    """Maximum seconds from the job's beginning to its end, all tries together."""
    start_deadline_s: Seconds = 1800
    """Maximum seconds for its cluster to come up."""
    keep_s: Count = 300
    """Seconds for which its cluster stays after a success."""
    keep_failed_s: Count = 3600
    """Seconds for which its head stays after a failure, so that you can read its logs."""
    runtime_env: JsonObject = {}
    """Ray's runtime environment of the job, such as `env_vars` or `working_dir`."""
    schedule: str | None = None
    """Five fields of cron: the job runs by the clock, with a cluster of its own each time."""
    time_zone: Annotated[str, Field(pattern=r"^[A-Za-z][-+/_A-Za-z0-9]*$")] | None = None
    """Time zone of `schedule`, such as `Europe/Berlin`; that of KubeRay's operator when not given."""
    keep_record_s: Count = 7 * 86_400
    """With `schedule`: seconds for which an ended RayJob stays, so that you can look at it. Nothing else deletes it."""

    @model_validator(mode="after")
    def _check(self) -> "JobConfig":
        if self.schedule is not None and not is_schedule(self.schedule):
            raise ValueError(f"schedule: expected five fields of cron, got {self.schedule!r}")
        if self.time_zone is not None and self.schedule is None:
            raise ValueError("time_zone: expected beside schedule")
        if self.time_zone is not None and not is_time_zone(self.time_zone):
            raise ValueError(f"time_zone: expected a name such as Europe/Berlin, got {self.time_zone!r}")
        if self.schedule is None and "keep_record_s" in self.model_fields_set:
            raise ValueError("keep_record_s: expected beside schedule")
        if self.schedule is not None and self.keep_record_s < max(self.keep_s, self.keep_failed_s):
            raise ValueError("keep_record_s: expected as long as keep_s and keep_failed_s, or longer")
        return self


class ServiceConfig(Config):
    """A gateway that stays."""

    serve: JsonObject
    """The Serve config, as `serve deploy` takes it."""
    api_keys_secret: Reference | None = None
    """Secret with the key keys.yaml, which the gateway finds at /etc/marl-ray/keys.yaml."""
    spool_size: Quantity = "1Gi"
    """Bound of /var/lib/marl-ray/spool, where exposures wait while the database is away."""
    delete_old_after_s: Seconds = 120
    """Seconds for which a replaced cluster stays; longer than its pods take to end."""


class ClusterConfig(Config):
    """A Ray cluster on Kubernetes."""

    name: Name
    """Name of the cluster, and the first part of the names of its resources."""
    image: Image
    """Image of all pods, which has marl-ray in the version of the command."""
    ray_version: Version = "2.60.0"
    """Version of Ray in the image."""
    head: NodeConfig = NodeConfig()
    """The head's pod, which runs no user's work, on machines that stay."""
    groups: dict[Name, GroupConfig] = Field(min_length=1)
    token: bool = True
    """Guard dashboard and jobs by a token, which KubeRay makes."""
    redis: RedisConfig | None = None
    queue: Queue | None = None
    """Kueue's local queue: all pods begin together, when there is room."""
    priority_class: Reference | None = None
    """Priority class of the pods."""
    service_account: Reference | None = None
    """Service account of the pods."""
    pull_secrets: tuple[Reference, ...] = ()
    """Secrets with which Kubernetes pulls the image."""
    env: dict[Variable, str] = {}
    """Environment variables of all pods."""
    secrets: tuple[Reference, ...] = ()
    """Secrets whose keys become environment variables, such as those of S3."""
    volumes: tuple[VolumeConfig, ...] = ()
    files: Reference | None = None
    """A ConfigMap whose keys all pods see as files in /etc/marl-ray."""
    user: Positive = 1000
    """Number of the user in the image; it cannot be root."""
    drain_s: Seconds = 60
    """Seconds in which a pod that ends may finish its work; Kubernetes waits 30 s longer."""
    job: JobConfig | None = None
    service: ServiceConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.job is not None and self.service is not None:
            raise ValueError("job, service: expected one of them at most")
        if self.job is not None and self.job.schedule is not None and len(self.name) > MAX_CRON_NAME_LENGTH:
            raise ValueError(
                f"name: expected {MAX_CRON_NAME_LENGTH} characters at most with job.schedule, got {len(self.name)}"
            )
        if DRAIN_VARIABLE in self.env:
            raise ValueError(f"env: expected drain_s instead of {DRAIN_VARIABLE}, for which Kubernetes must wait")
        if self.files is not None and self.service is not None and self.service.api_keys_secret is not None:
            raise ValueError("files, service.api_keys_secret: expected one of them, as both are /etc/marl-ray")
        for name in ("head", "submitter"):
            if name in self.groups:
                raise ValueError(f"groups: expected another name than {name}, which pods of the cluster have")
        paths = [*RESERVED_PATHS, *(volume.path.rstrip("/") for volume in self.volumes)]
        taken = next((path for number, path in enumerate(paths) if path in paths[:number]), None)
        if taken is not None:
            raise ValueError(f"volumes: expected each path once, and not {', '.join(RESERVED_PATHS)}; got {taken}")
        scaling = [name for name, group in self.groups.items() if group.is_autoscaled]
        if self.queue is not None and self.service is not None and scaling:
            raise ValueError(
                f"groups.{scaling[0]}.replicas: expected one number, as Kueue takes no service that scales"
            )
        longest = max(map(len, self.groups))
        if any(group.spot for group in self.groups.values()) and longest > MAX_SPOT_NAME_LENGTH:
            raise ValueError(
                f"groups: expected names of at most {MAX_SPOT_NAME_LENGTH} characters where a group is spot"
            )
        doubled = sorted(name for name in self.groups if self.groups[name].spot and f"{name}-fallback" in self.groups)
        if doubled:
            raise ValueError(f"groups: {doubled[0]}-fallback is what the spot group {doubled[0]} falls back to")
        return self
