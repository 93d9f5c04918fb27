"""The config of a gateway: its experiments, their arms and weights."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import Config
from marl_ray.config.run import Name


class ArmConfig(Config):
    """One arm: a bundle and its share of the traffic."""

    bundle: str
    """Bundle folder or `models:/name/version`."""
    weight: NonNegativeFloat = 1.0
    """Share of the units, relative to the other arms' weights."""


class ExperimentConfig(Config):
    """Arms that compete for units (sessions). The first arm is the control."""

    name: str = Name
    arms: dict[str, ArmConfig] = Field(min_length=2)
    salt: str | None = None
    """Salt of the assignment hash; the experiment's name when not given."""
    alpha: float = Field(0.05, gt=0, lt=1)
    """Error probability of the confidence sequences, valid at any time."""
    margin: PositiveFloat = 0.02
    """Non-inferiority margin in units of the outcome."""
    min_outcomes: PositiveInt = 50
    """Outcomes each arm needs before a verdict."""

    @model_validator(mode="after")
    def _some_traffic(self) -> "ExperimentConfig":
        if not any(arm.weight > 0 for arm in self.arms.values()):
            raise ValueError("arms: at least one weight must be above zero")
        return self


class GatewayConfig(Config):
    """What `serve deploy` starts."""

    experiments: list[ExperimentConfig] = Field(min_length=1)
    database: str = "sqlite:///runs/experiments.db"
    """SQLAlchemy URL of the experiment store."""
    tracking_uri: str | None = None
    """MLflow URI that resolves `models:/name/version`; MLflow's own default when not given."""
    max_batch: PositiveInt = 64
    """Observations of one arm that share one forward pass."""
    max_body_bytes: PositiveInt = 1_000_000
    replicas: PositiveInt = 1
    cpus_per_replica: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _distinct_names(self) -> "GatewayConfig":
        names = [experiment.name for experiment in self.experiments]
        if len(set(names)) != len(names):
            raise ValueError("experiments: names must differ")
        return self
