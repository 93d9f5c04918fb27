"""Checks algorithms, whose updates are compared with their formulas on tiny games."""

from collections.abc import Iterator, Mapping

from marl_ray.conformance.algorithm.check import check_algorithm
from marl_ray.conformance.extensions.properties import CheckedProperty, load_part, refuse_unknown_settings
from marl_ray.extensions import ALGORITHM


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Compare an algorithm's updates with its formulas; it has no settings."""
    refuse_unknown_settings("algorithm", settings)
    load_part(ALGORITHM, name)
    return check_algorithm(name)
