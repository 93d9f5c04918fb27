"""Config of a metric: the numbers it may take, and the accepted loss against the control."""

import sys
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from marl_ray.config.base import Config


class RelativeMargin(Config):
    """A margin in proportion to the control's mean."""

    relative: float = Field(gt=0, lt=1)
    """Part of the control's mean: 0.02 accepts a mean that is 2 % worse."""


def _read_margin(value: Any) -> Any:
    """Read a margin: `"2%"` becomes `{"relative": 0.02}`; other margins stay as they are."""
    relative = value.get("relative") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            relative = float(value.strip().removesuffix("%")) / 100
        except ValueError:
            relative = None
    if isinstance(relative, int | float) and not isinstance(relative, bool) and 0 < relative < 1:
        return {"relative": relative}
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    if isinstance(value, RelativeMargin):
        return value
    raise ValueError("expected a number of 0 or more in units of the metric, or a part of the control's mean as '2%'")


def _read_range(value: Any) -> Any:
    numbers = isinstance(value, list | tuple) and len(value) == 2
    if numbers and all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= 1e100 for x in value):
        low, high = value
        if low < high:
            return float(low), float(high)
    raise ValueError("expected [low, high] with low < high")


_PART_SCHEMA = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
_OBJECT_SCHEMA = {
    "type": "object",
    "properties": {"relative": _PART_SCHEMA},
    "required": ["relative"],
    "additionalProperties": False,
}
_MARGIN_SCHEMAS = [
    {"type": "number", "minimum": 0},
    {"type": "string", "pattern": r"^[0-9]{1,2}(\.[0-9]+)?%$"},
    _OBJECT_SCHEMA,
]
_END_SCHEMA = {"type": "number", "minimum": -1e100, "maximum": 1e100}
Margin = Annotated[float | RelativeMargin, BeforeValidator(_read_margin), WithJsonSchema({"anyOf": _MARGIN_SCHEMAS})]
Range = Annotated[
    tuple[float, float],
    BeforeValidator(_read_range),
    WithJsonSchema({"type": "array", "items": _END_SCHEMA, "minItems": 2, "maxItems": 2}),
]


def check_measure(
    name: str,
    margin: float | RelativeMargin,
    bounds: tuple[float, float] | None,
    winsorize: tuple[float, float] | None,
) -> None:
    """Raise ValueError if the config of a metric contradicts itself."""
    if bounds and winsorize:
        raise ValueError(f"bounds, winsorize: expected one of them for {name!r}")
    limits = bounds or winsorize
    if isinstance(margin, RelativeMargin) and limits and limits[0] < 0:
        raise ValueError(
            f"margin: a part of the control's mean needs a metric that is 0 or more, but {name!r} may be {limits[0]:g}"
        )
