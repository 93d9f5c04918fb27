"""The config of a gateway: its experiments, its database, and the limits of its clients."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import HTTP_URL, MEMORY_OR_REDIS, NAME_PATTERN, ORIGIN, Config
from marl_ray.config.serving.arms import Replicas
from marl_ray.config.serving.experiment import ExperimentConfig


class RateLimitConfig(Config):
    """Requests of one API key (of all clients together, where there are no keys), per replica."""

    per_s: PositiveFloat
    """Requests per second, in the long run."""
    burst: PositiveInt = 100
    """Requests that may come at once after a quiet time."""


class CacheConfig(Config):
    """Kept answers to `mode: greedy`, which are the same for the same observations."""

    url: str = Field(default="memory:", pattern=MEMORY_OR_REDIS)
    """`memory:` (each replica its own) or `redis://host:port/0` (shared)."""
    entries: PositiveInt = 100_000
    """With `memory:`: most answers that are kept; the least recently used answer goes first."""
    ttl_s: PositiveFloat = 300.0
    """Seconds for which an answer is kept."""


class WebhookConfig(Config):
    """Webhook that is told of every rollback, promotion and stage."""

    url: str = Field(pattern=HTTP_URL)
    """URL that gets a POST of the audit entry as JSON; any 2xx is a receipt."""
    secret_env: str = Field(default="MARL_RAY_WEBHOOK_SECRET", min_length=1)
    """Environment variable with the secret of the signature: HMAC-SHA256 of `TIMESTAMP.BODY`,
    in the header `x-marl-ray-signature`."""
    deadline_s: PositiveFloat = 86_400.0
    """Seconds after a change during which its delivery is tried."""


class GatewayConfig(Config):
    """The gateway that `serve deploy` starts.

    Experiments may also be created over HTTP; those are in the database alone.
    """

    experiments: list[ExperimentConfig] = []
    """Experiments that exist from the start; others are created over HTTP."""
    holdouts: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Annotated[float, Field(ge=0, lt=1)]] = {}
    """Endpoint -> share of its units that no experiment there gets, by a hash of both: they meet the newest experiment's
    control, and what all experiments bring together is measured against them."""
    database: str = "sqlite:///runs/experiments.db"
    """SQLAlchemy URL of the experiment store."""
    tracking_uri: str | None = None
    """MLflow URI that resolves `models:/name/version`; when not given that of
    MLFLOW_TRACKING_URI, or else `sqlite:///runs/mlflow.db`."""
    max_batch: PositiveInt = 64
    """Observations of one arm that share one forward pass."""
    max_body_bytes: PositiveInt = 1_000_000
    """Maximum size of a request's body in bytes; larger ones are answered with 413."""
    max_batch_requests: PositiveInt = 256
    """Requests in one `/batch`."""
    request_timeout_s: PositiveFloat = 10.0
    """Deadline of a request (504); the header `x-request-timeout-seconds` may shorten it."""
    rate_limit: RateLimitConfig | None = None
    """Limit of acts, outcomes and changes."""
    read_limit: RateLimitConfig | None = RateLimitConfig(per_s=50, burst=200)
    """Limit of reports, charts, lists and pages."""
    cors: tuple[Annotated[str, Field(pattern=ORIGIN)], ...] = ()
    """Origins (`https://play.example.com`, or `*` for all) whose pages may ask this gateway; none when not given. Cookies
    are never allowed, as there are none."""
    cache: CacheConfig | None = None
    spool: str = "runs/spool"
    """Folder that keeps exposures while the database is away."""
    spool_bytes: PositiveInt = 256_000_000
    """Bound of the spool, per replica; beyond it exposures are dropped and counted."""
    decision_log: str | None = None
    """Folder (or `s3://bucket/prefix`) for every observation, action and log-probability, and every text with its tokens,
    from which `marl-ray export` makes trajectories; not kept when not given."""
    webhook: WebhookConfig | None = None
    access_log: Literal["errors", "all"] = "errors"
    """Requests that leave a line of JSON in the log."""
    api_keys: str | None = None
    """YAML file of keys (`keys: [{name, sha256, scopes}]`, scopes of inference, outcomes, read, admin). Without it anybody
    may act, post outcomes and read, and nobody may change an experiment over HTTP."""
    replicas: Replicas = 1
    """Replicas of the gateway, or `[least, most]`, as the load asks for."""
    cpus_per_replica: PositiveFloat = 1.0
    """Logical CPUs that Ray reserves for each replica."""

    @model_validator(mode="after")
    def _check_names(self) -> "GatewayConfig":
        names = [experiment.name for experiment in self.experiments]
        if len(set(names)) != len(names):
            raise ValueError("experiments: names must differ")
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> "GatewayConfig":
        shares = sorted(
            (experiment.layer, *experiment.layer_share, experiment.name)
            for experiment in self.experiments
            if experiment.layer is not None
        )
        for (layer, _, high, first), (next_layer, low, _, second) in pairwise(shares):
            if layer == next_layer and low < high:
                raise ValueError(
                    f"experiments: {first} and {second} overlap in layer {layer!r}, expected disjoint layer_share"
                )
        return self
