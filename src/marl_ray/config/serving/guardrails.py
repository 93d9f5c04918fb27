"""The config of guardrails, the metrics that a treatment must not make worse."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from marl_ray.config.base import Config
from marl_ray.config.serving.arms import MIN_WEIGHT
from marl_ray.config.serving.measures import Margin, Range, check_measure

Alpha = Annotated[float, Field(ge=MIN_WEIGHT, lt=0.5)]
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
"""Metrics that are 0 or 1 for each unit."""
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
    def _check_measure(self) -> "GuardrailConfig":
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
    def _check_direction(cls, data: object) -> object:
        if isinstance(data, dict) and "better" not in data:
            name = data.get("name")
            if isinstance(name, str) and name not in BETTER_BY_DEFAULT:
                raise ValueError(f"better: expected lower or higher for the metric {name!r}")
            return data | {"better": BETTER_BY_DEFAULT.get(str(name), "lower")}
        return data
