"""The population of an experiment: a share of the units that have certain attributes, drawn by a hash."""

from collections.abc import Mapping
from dataclasses import dataclass

from marl_ray.experiments.assignment.rendezvous import is_in_share
from marl_ray.json_types import JsonMapping

Attribute = bool | int | float | str
Attributes = Mapping[str, Attribute]
"""Attributes that a request states about its unit, by name."""


@dataclass(frozen=True, slots=True)
class Population:
    """The units that take part in an experiment.

    Equal populations take the same units, in whatever order their config lists the values.
    """

    share: float = 1.0
    """Part of all units, from 0 to 1."""
    required_attributes: frozenset[tuple[str, frozenset[tuple[bool, Attribute]]]] = frozenset()
    """Names of attributes, each with the values that a unit of the population may have, and whether they are booleans."""

    @property
    def is_everyone(self) -> bool:
        """True if every unit is in the population."""
        return self.share >= 1 and not self.required_attributes

    def may_include(self, salt: str, unit: str) -> bool:
        """Return True if the unit is in the share, so that only its attributes can still exclude it."""
        return self.share >= 1 or is_in_share(salt, self.share, unit)

    def includes(self, salt: str, unit: str, attributes: Attributes) -> bool:
        """Return True if a unit with these attributes takes part. A unit that lacks a required attribute does not."""
        for name, values in self.required_attributes:
            value = attributes.get(name)
            if value is None or _typed_attribute(value) not in values:
                return False
        return self.may_include(salt, unit)


EVERYONE = Population()
"""The population of an experiment whose config names none."""


def population_of(config: JsonMapping) -> Population:
    """Return the population of an experiment's stored config."""
    population = config.get("population") or {}
    required = population.get("attributes", {}).items()
    return Population(
        population.get("share", 1.0),
        frozenset((name, frozenset(map(_typed_attribute, values))) for name, values in required),
    )


def _typed_attribute(value: Attribute) -> tuple[bool, Attribute]:
    # True equals 1 in Python, and is another value to a client.
    return isinstance(value, bool), value
