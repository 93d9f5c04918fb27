"""The config of a gateway: its experiments, their arms and weights."""

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from marl_ray.config.base import HTTP_URL, MEMORY_OR_REDIS, NAME_PATTERN, ORIGIN, Config
from marl_ray.config.run.sections import NAME_FIELD
from marl_ray.config.serving.arms import MIN_WEIGHT, ArmConfig, Replicas
from marl_ray.config.serving.measures import Margin, Range, check_measure

Share = Annotated[float, Field(ge=0, le=1)]
Alpha = Annotated[float, Field(ge=MIN_WEIGHT, lt=0.5)]
ArmName = Annotated[str, Field(min_length=1, max_length=100)]
BETTER_BY_DEFAULT: dict[str, Literal["lower", "higher"]] = {
    "outcome": "higher",
    "latency_s": "lower",
    "error": "lower",
    "cost": "lower",
    "cost_usd": "lower",
    "violation": "lower",
}
"""Metrics whose good direction is known; for any other metric the config must give it."""


BINARY_METRICS = frozenset({"error", "violation"})
Missing = Literal["exclude"] | Annotated[float, Field(ge=-1e100, le=1e100)]
"""Value that a unit without a report counts with when its window is over; `exclude`: the unit does not count."""


def counts_as(metric: str, missing: float | str | None) -> float | None:
    """Return the value that a unit without the metric counts with; None if `missing` leaves such a unit out."""
    if missing is None:
        return 0.0 if metric in BINARY_METRICS else None
    return None if isinstance(missing, str) else float(missing)


class GuardrailConfig(Config):
    """A quantity that a treatment must not make worse; proven harm rolls the treatment back."""

    name: str = Field(min_length=1, max_length=100)
    """`outcome`, `latency_s`, `error`, `cost`, `cost_usd`, `violation`, or the name of any metric that units report."""
    better: Literal["lower", "higher"]
    """Direction that is good. Known for the six names above, to be given for any other."""
    margin: Margin = 0.0
    """Accepted loss against the control: a number in units of the metric, or a part of the control's mean (`2%`, or
    `{relative: 0.02}`)."""
    bounds: Range | None = None
    """[low, high] that the metric cannot leave: other values are refused. With bounds an exact test decides."""
    winsorize: Range | None = None
    """[low, high] that values are moved into before they count: the exact test decides on the mean of the moved values."""
    alpha: Alpha = 0.05
    """Probability of a false rollback by this guardrail, over all looks."""
    binary: bool | None = None
    """True if the metric is 0 or 1 per unit, for which there is a test for rare events; the default for `error` and
    `violation`, if neither `bounds` nor `winsorize` is given."""

    missing: Missing | None = None
    """Value that a unit counts with whose window ends without a value of the metric: a number, or `exclude` (it does
    not count). When not given, 0 for `error` and `violation`, `exclude` for all others."""

    @property
    def is_binary(self) -> bool:
        """True if the metric is 0 or 1 per unit, as `binary` says or its name and keys imply."""
        if self.binary is None:
            return self.name in BINARY_METRICS and self.bounds is None and self.winsorize is None
        return self.binary

    @model_validator(mode="after")
    def _consistent_measure(self) -> "GuardrailConfig":
        check_measure(self.name, self.margin, self.bounds, self.winsorize)
        if self.name == "outcome" and (self.bounds or self.winsorize):
            raise ValueError("bounds, winsorize: those of the outcome are keys of the experiment, not of its guardrail")
        if self.binary and (self.bounds or self.winsorize):
            raise ValueError(f"binary: expected either binary, bounds or winsorize for {self.name!r}")
        return self

    @property
    def counts_missing_as(self) -> float | None:
        """The value of a unit that has reported none; None if such a unit does not count."""
        return counts_as(self.name, self.missing)

    @model_validator(mode="before")
    @classmethod
    def _known_direction(cls, data: object) -> object:
        if isinstance(data, dict) and "better" not in data:
            name = data.get("name")
            if isinstance(name, str) and name not in BETTER_BY_DEFAULT:
                raise ValueError(f"better: expected lower or higher for the metric {name!r}")
            return data | {"better": BETTER_BY_DEFAULT.get(str(name), "lower")}
        return data


class BreakerConfig(Config):
    """Circuit breaker: it decides when a replica stops asking an arm that fails."""

    failures: PositiveInt = 5
    """Failed passes in a row that open the circuit. Requests that share a pass, or a call of another process, count once."""
    open_s: PositiveFloat = 5.0
    """Seconds until an open circuit lets probes through (half-open)."""
    probes: PositiveInt = 3
    """Successful probes in a row that close it again; one that fails opens it anew."""
    on_open: Literal["rollback", "fallback"] = "fallback"
    """Effect of a treatment's open circuit: the control answers until it closes (`fallback`); or that as well, and the
    treatment is rolled back for good once `rounds` rounds of probes have failed (`rollback`)."""
    rounds: PositiveInt = 3
    """With `on_open: rollback`: rounds of probes that fail in a row, `open_s` apart, without
    the circuit closing between."""


def _attribute(value: object) -> object:
    fine = (
        0 < len(value) <= MAX_ATTRIBUTE_LENGTH and value.isprintable()
        if isinstance(value, str)
        else isinstance(value, bool | int | float) and math.isfinite(value)
    )
    if not fine:
        raise ValueError(f"expected a boolean, a number, or a text of 1 to {MAX_ATTRIBUTE_LENGTH} printable characters")
    return value


MAX_ATTRIBUTES, MAX_ATTRIBUTE_NAME, MAX_ATTRIBUTE_LENGTH = 32, 100, 256
"""Maximum number of attributes of a unit, and maximum number of characters of a name and of a text."""
AttributeName = Annotated[str, Field(min_length=1, max_length=MAX_ATTRIBUTE_NAME)]
AttributeValue = Annotated[bool | int | float | str, BeforeValidator(_attribute)]


class PopulationConfig(Config):
    """Units that take part; the others get production and are not counted."""

    share: float = Field(default=1.0, ge=MIN_WEIGHT, le=1)
    """Share of the units (of clusters, with `randomize: cluster`), by a hash of the salt and the unit."""
    attributes: dict[AttributeName, tuple[AttributeValue, ...]] = Field(default={}, max_length=MAX_ATTRIBUTES)
    """Name -> values of the requests' `attributes`. A unit takes part whose request has one of the values of every name."""

    @model_validator(mode="after")
    def _sensible_attributes(self) -> "PopulationConfig":
        for name, values in self.attributes.items():
            if not name.isprintable():
                raise ValueError(f"attributes: expected printable names, got {name!r}")
            if not values:
                raise ValueError(f"attributes.{name}: expected at least one value")
        return self


class ExperimentConfig(Config):
    """Arms that compete for units (sessions): a control and treatments."""

    name: str = NAME_FIELD
    """Name of the experiment, for good: its units and its audit log are kept under it."""
    endpoint: str | None = Field(default=None, pattern=NAME_PATTERN)
    """The name that clients act on, kept from one experiment to the next; the experiment's name when not given."""
    arms: dict[ArmName, ArmConfig] = Field(min_length=1)
    """The first is the control. One alone is served as it is."""
    placement: Literal["replica", "deployment"] = "replica"
    """Place where the arms' policies run: in every gateway replica (one hop; small policies), or each arm in a
    deployment of its own (two hops; large ones)."""
    randomize: Literal["session", "cluster", "switchback"] = "session"
    """Thing that is assigned to an arm: a session; all sessions of one `cluster_id` of the requests (a match, a lobby);
    or all sessions that begin in one block of time. The last two are for arms that influence each other's sessions; the
    statistics then take a cluster or block as one observation."""
    block_s: float = Field(default=600.0, ge=1, allow_inf_nan=False)
    """With `switchback`: length of a block in seconds."""
    washout_s: NonNegativeFloat = 0.0
    """With `switchback`: sessions that begin this soon after a change of block do not count."""
    salt: str | None = None
    """Salt of the assignment hash; the experiment's name when not given."""
    strategy: Literal["ab", "gradual", "shadow", "replace", "thompson"] = "ab"
    """`ab`: the weights as given. `gradual`: `stages` are the treatments' share. `shadow`: the control answers, the
    treatments get a copy of the traffic. `replace`: the treatments get everything at once. `thompson`: from the weights as
    given, an arm's share becomes the chance that it is the best."""
    autostart: bool = True
    """Run as soon as the experiment is first opened; else it waits as a draft, all units with the control."""
    stages: tuple[Share, ...] = Field(default=(0.01, 0.05, 0.25, 0.5, 1.0), min_length=1)
    """With `gradual`: the treatments' share of the units, stage by stage. They split it by their weights."""
    reweigh_s: PositiveFloat = 3600.0
    """With `thompson`: seconds between two changes of the weights. Each is a new epoch; sessions keep their arms."""
    floor: Share = 0.05
    """With `thompson`: the least share of an arm that is not rolled back; at most 1 / arms."""
    min_exposures: NonNegativeInt = 100
    """Units that every arm with traffic must have in a stage before the next one."""
    min_duration_s: NonNegativeFloat = 60.0
    """Seconds that a stage takes at least."""
    promotion: Literal["automatic", "manual"] | None = None
    """Promotion of a proven treatment: by itself, or by a person; when not given, by itself under `gradual` and
    `replace`. Rolling back never waits for a person."""
    on_rollback: Literal["cut", "drain"] = "cut"
    """Units already with a rolled-back arm continue with the control at once (`cut`) or finish there (`drain`)."""
    layer: str | None = Field(default=None, min_length=1, max_length=100)
    """Experiments of one layer share a population; disjoint `layer_share`s make them mutually exclusive."""
    layer_share: tuple[Share, Share] = (0.0, 1.0)
    """[low, high) of the layer's units that take part; the others are not in the experiment."""
    population: PopulationConfig = PopulationConfig()
    """Units that take part, among those in the layer's share. A unit that has its arm stays,
    whatever its attributes later."""
    breaker: BreakerConfig = BreakerConfig()
    shadow_concurrency: PositiveInt = 16
    """With `shadow`: copies of requests under way per replica; more are dropped and counted."""
    outcome_window_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds after a unit's first exposure in which its outcome and metrics count. The unit is judged when they are over.
    Take it longer than the slowest outcome of any arm. It cannot change once the experiment has units."""
    missing: Missing = "exclude"
    """Value that a unit counts with whose window ends without an outcome: a number, or `exclude` (it does not count; a
    test then watches whether the arms' units report equally often)."""
    guardrails: tuple[GuardrailConfig, ...] = ()
    """Metrics that a treatment must not make worse, besides the outcome's own harm test."""
    alpha: Alpha = 0.05
    """Error probability of the confidence sequences, valid at any time."""
    alpha_rollback: Alpha = 0.05
    """Probability of a false rollback by the outcome's harm test, over all looks."""
    margin: Margin = 0.02
    """Non-inferiority margin: a number above 0 in units of the outcome, or a part of the control's mean (`2%`, or
    `{relative: 0.02}`)."""
    bounds: Range | None = None
    """[low, high] that outcomes cannot leave: others are refused. With bounds an exact test decides, which no rare large
    loss misleads."""
    winsorize: Range | None = None
    """[low, high] that outcomes are moved into before they count, instead of `bounds`. The exact test then decides on the
    mean of the moved outcomes; as they came, they stay in the database."""
    min_outcomes: PositiveInt = 50
    """Outcomes each arm needs before a verdict."""

    @property
    def served_as(self) -> str:
        """The endpoint's name."""
        return self.endpoint or self.name

    def range_of(self, metric: str) -> tuple[float, float] | None:
        """Return (low, high) of the values that count of a metric (or `outcome`); None if nothing bounds them."""
        if metric == "outcome":
            return self.bounds or self.winsorize
        return next((rail.bounds or rail.winsorize for rail in self.guardrails if rail.name == metric), None)

    @property
    def unbounded(self) -> tuple[str, ...]:
        """The outcome and guardrails that a rare large value can mislead."""
        rails = (rail.name for rail in self.guardrails if not rail.is_binary)
        return tuple(dict.fromkeys(name for name in ("outcome", *rails) if self.range_of(name) is None))

    @property
    def promotes(self) -> bool:
        """True if a proven treatment is promoted by itself."""
        return self.promotion == "automatic" or (self.promotion is None and self.strategy in ("gradual", "replace"))

    @model_validator(mode="after")
    def _some_traffic(self) -> "ExperimentConfig":
        if not any(arm.weight > 0 for arm in self.arms.values()):
            raise ValueError("arms: at least one weight must be above zero")
        treatments = list(self.arms.values())[1:]
        if self.strategy in ("gradual", "replace") and not any(arm.weight > 0 for arm in treatments):
            raise ValueError(
                f"arms: strategy {self.strategy} needs a treatment (not the first arm) with weight above zero"
            )
        return self

    @model_validator(mode="after")
    def _shares_make_sense(self) -> "ExperimentConfig":
        if any(0 < arm.weight < MIN_WEIGHT for arm in self.arms.values()):
            raise ValueError(f"arms: expected weights of 0, or {MIN_WEIGHT:g} at least")
        if not all(name.isprintable() for name in self.arms):
            raise ValueError("arms: expected printable names")
        if self.stages[0] < MIN_WEIGHT or any(after <= before for before, after in pairwise(self.stages)):
            raise ValueError(
                f"stages: expected rising shares of {MIN_WEIGHT:g} at least and 1 at most, got {list(self.stages)}"
            )
        if self.margin == 0:
            raise ValueError("margin: expected a number above 0, or a part of the control's mean as '2%'")
        check_measure("outcome", self.margin, self.bounds, self.winsorize)
        for rail in self.guardrails:
            if rail.name == "outcome":
                check_measure("outcome", rail.margin, self.bounds, self.winsorize)
        if self.strategy == "thompson" and not all(arm.weight > 0 for arm in self.arms.values()):
            raise ValueError("arms: strategy thompson needs weights above zero")
        if self.strategy == "thompson" and self.floor * len(self.arms) > 1:
            raise ValueError(f"floor: expected at most 1/{len(self.arms)}, the number of arms, got {self.floor:g}")
        low, high = self.layer_share
        if low >= high:
            raise ValueError(f"layer_share: expected low < high, got [{low:g}, {high:g})")
        if self.layer is None and self.layer_share != (0.0, 1.0):
            raise ValueError("layer_share: needs a layer")
        if any(guardrail.name == "outcome" and guardrail.missing is not None for guardrail in self.guardrails):
            raise ValueError(
                "guardrails: missing is not read of the guardrail outcome; expected the experiment's own missing"
            )
        names = [guardrail.name for guardrail in self.guardrails]
        if len(set(names)) != len(names):
            raise ValueError("guardrails: names must differ")
        return self


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
    def _distinct_names(self) -> "GatewayConfig":
        names = [experiment.name for experiment in self.experiments]
        if len(set(names)) != len(names):
            raise ValueError("experiments: names must differ")
        return self

    @model_validator(mode="after")
    def _layers_are_exclusive(self) -> "GatewayConfig":
        layered = sorted((e.layer, *e.layer_share, e.name) for e in self.experiments if e.layer is not None)
        for (layer, _, high, first), (other, low, _, second) in pairwise(layered):
            if layer == other and low < high:
                raise ValueError(
                    f"experiments: {first} and {second} overlap in layer {layer!r}, expected disjoint layer_share"
                )
        return self
