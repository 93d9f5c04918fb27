"""The config of an experiment: its arms, how traffic is split between them, and when one is promoted or rolled back."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import NAME_PATTERN, Config
from marl_ray.config.run.sections import NAME_FIELD
from marl_ray.config.serving.arms import MIN_WEIGHT, ArmConfig
from marl_ray.config.serving.guardrails import Alpha, GuardrailConfig, Missing
from marl_ray.config.serving.measures import Margin, Range, check_measure
from marl_ray.config.serving.population import PopulationConfig

Share = Annotated[float, Field(ge=0, le=1)]
ArmName = Annotated[str, Field(min_length=1, max_length=100)]


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
    """With `gradual`: the treatments' share of the units, stage by stage. The treatments split it by their weights."""
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
    Take it longer than the slowest outcome of any arm. The window cannot change once the experiment has units."""
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
    def has_automatic_promotion(self) -> bool:
        """True if a proven treatment is promoted by itself."""
        return self.promotion == "automatic" or (self.promotion is None and self.strategy in ("gradual", "replace"))

    @model_validator(mode="after")
    def _check_traffic(self) -> "ExperimentConfig":
        if not any(arm.weight > 0 for arm in self.arms.values()):
            raise ValueError("arms: at least one weight must be above zero")
        treatments = list(self.arms.values())[1:]
        if self.strategy in ("gradual", "replace") and not any(arm.weight > 0 for arm in treatments):
            raise ValueError(
                f"arms: strategy {self.strategy} needs a treatment (not the first arm) with weight above zero"
            )
        return self

    @model_validator(mode="after")
    def _check_shares(self) -> "ExperimentConfig":
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
