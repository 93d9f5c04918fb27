"""Algorithms: the suite of tiny games, on which an update is compared with its formulas."""

from collections.abc import Iterator, Mapping

from marl_ray.conformance.algorithm.check import check_algorithm
from marl_ray.conformance.extensions.base import CheckedProperty, load_part, refuse
from marl_ray.extensions import ALGORITHM


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Compare an algorithm's updates with its formulas; it has no settings."""
    refuse("algorithm", settings)
    load_part(ALGORITHM, name)
    return check_algorithm(name)
