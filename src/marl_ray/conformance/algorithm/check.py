"""Runs the conformance suite on one algorithm."""

from collections.abc import Iterator
from functools import partial

from marl_ray.config import spec_of
from marl_ray.conformance.algorithm.properties import PROPERTIES
from marl_ray.conformance.extensions.properties import CheckedProperty, check_property
from marl_ray.conformance.torch_threads import one_thread
from marl_ray.errors import MarlRayError
from marl_ray.training.single_process import process_group


def check_algorithm(algorithm: str) -> Iterator[CheckedProperty]:
    """Check every property that applies to the algorithm.

    An error of the algorithm's own functions is a difference, too. Raises MarlRayError for an algorithm that learns
    from no play.
    """
    if spec_of(algorithm).pairs:
        raise MarlRayError(f"algorithm: {algorithm} learns from preferred pairs, and the suite's games are played")
    with one_thread(), process_group():
        for game_property in PROPERTIES:
            if game_property.applies(algorithm):
                yield check_property(
                    game_property.name, game_property.text, partial(game_property.find_difference, algorithm)
                )
