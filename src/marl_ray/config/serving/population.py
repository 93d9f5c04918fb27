"""The config of an experiment's population, the units that take part."""

import sys
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from marl_ray.config.base import Config
from marl_ray.config.serving.arms import MIN_WEIGHT

MAX_ATTRIBUTES = 32
"""Maximum number of attributes of a unit."""
MAX_ATTRIBUTE_NAME = 100
"""Maximum number of characters of an attribute's name."""
MAX_ATTRIBUTE_LENGTH = 256
"""Maximum number of characters of an attribute that is a text."""


def _check_attribute(value: object) -> object:
    is_valid = (
        0 < len(value) <= MAX_ATTRIBUTE_LENGTH and value.isprintable()
        if isinstance(value, str)
        else isinstance(value, bool | int | float) and abs(value) <= sys.float_info.max
    )
    if not is_valid:
        raise ValueError(f"expected a boolean, a number, or a text of 1 to {MAX_ATTRIBUTE_LENGTH} printable characters")
    return value


AttributeName = Annotated[str, Field(min_length=1, max_length=MAX_ATTRIBUTE_NAME)]
AttributeValue = Annotated[bool | int | float | str, BeforeValidator(_check_attribute)]


class PopulationConfig(Config):
    """Units that take part; the others get production and are not counted."""

    share: float = Field(default=1.0, ge=MIN_WEIGHT, le=1)
    """Share of the units (of clusters, with `randomize: cluster`), by a hash of the salt and the unit."""
    attributes: dict[AttributeName, tuple[AttributeValue, ...]] = Field(default={}, max_length=MAX_ATTRIBUTES)
    """Name -> values of the requests' `attributes`. A unit takes part whose request has one of the values of every name."""

    @model_validator(mode="after")
    def _check_attributes(self) -> "PopulationConfig":
        for name, values in self.attributes.items():
            if not name.isprintable():
                raise ValueError(f"attributes: expected printable names, got {name!r}")
            if not values:
                raise ValueError(f"attributes.{name}: expected at least one value")
        return self
