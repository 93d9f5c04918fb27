"""The settings of schedulers, of those that come with the product and of users' own."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from marl_ray.config.base import Config
from marl_ray.errors import MarlRayError
from marl_ray.extensions import SCHEDULER


class SchedulerSettings(Config):
    """The keys of `scheduler` that every scheduler has; the settings of a scheduler extend them with its own."""

    hands_weights: ClassVar[bool] = False
    """True if a trial may take over another's weights, so that all trials need one shape."""
    kind: str
    """The scheduler: a name or `package.module:NAME`."""


class FifoSettings(SchedulerSettings):
    """Every configuration runs to its end."""

    kind: Literal["fifo"] = "fifo"


class AshaSettings(SchedulerSettings):
    """Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934).

    All trials run to a first rung, and the best of them continue.
    """

    kind: Literal["asha"]
    grace: PositiveInt
    """Environment steps of the first rung."""
    reduction: int = Field(default=3, ge=2)
    """One of this many continues at each rung, and the next rung has this many times the steps."""


class MedianSettings(SchedulerSettings):
    """Median stopping (Golovin et al. 2017): stopped when the best so far is below the median of the others' means."""

    kind: Literal["median"]
    grace: PositiveInt
    """Environment steps before the first decision."""
    interval: PositiveInt
    """Environment steps between decisions."""
    min_trials: int = Field(default=3, ge=1)
    """Configurations to compare with before any is stopped."""


class PbtSettings(SchedulerSettings):
    """Population-based training (Jaderberg et al. 2017, arXiv 1711.09846), synchronous.

    The worst take the weights and optimiser state of the best, and perturbed hyper-parameters.
    """

    hands_weights: ClassVar[bool] = True
    kind: Literal["pbt"]
    interval: PositiveInt
    """Environment steps between exploits."""
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the population that is replaced, and that is copied from."""
    resample: float = Field(default=0.25, ge=0, le=1)
    """Probability that a hyper-parameter is drawn anew from the space, not perturbed."""
    factors: tuple[PositiveFloat, PositiveFloat] = (0.8, 1.2)
    """Two factors; a number is multiplied by one of them."""


class Pb2Settings(SchedulerSettings):
    """Population-based bandits (Parker-Holder et al. 2020, arXiv 2002.02518).

    Exploits are as in PBT; the new hyper-parameters maximise a time-varying Gaussian process's upper confidence
    bound. Numbers only.
    """

    hands_weights: ClassVar[bool] = True
    kind: Literal["pb2"]
    interval: PositiveInt
    """Environment steps between exploits."""
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the population that is replaced, and that is copied from."""


def _validate_settings(data: object, built_in: ValidatorFunctionWrapHandler) -> object:
    """Validate the settings of a built-in scheduler by the union, and others by the class that the scheduler names."""
    kind = None
    if isinstance(data, SchedulerSettings):
        kind = data.kind
    elif isinstance(data, Mapping):
        kind = data.get("kind")
    if not isinstance(kind, str) or kind in SCHEDULER.builtins:
        return built_in(data)
    try:
        settings = getattr(SCHEDULER.load(kind), "Settings", None)
    except MarlRayError as error:
        raise ValueError(str(error)) from error
    if not (isinstance(settings, type) and issubclass(settings, SchedulerSettings)):
        raise ValueError(f"{kind!r} has no class `Settings`, expected one that extends SchedulerSettings")
    return settings.model_validate(data)


SchedulerConfig = Annotated[
    Annotated[FifoSettings | AshaSettings | MedianSettings | PbtSettings | Pb2Settings, Field(discriminator="kind")],
    WrapValidator(_validate_settings),
    PlainSerializer(lambda settings: settings.model_dump(mode="json")),
]
