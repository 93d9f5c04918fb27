"""Runs the conformance suite on one algorithm and prints a line for every property."""

from collections.abc import Callable

import torch

from marl_ray.config import spec_of
from marl_ray.conformance.algorithm.properties import PROPERTIES
from marl_ray.errors import MarlRayError, one_line
from marl_ray.training.single_process import process_group


def check_algorithm(algorithm: str, tell: Callable[[str], None]) -> bool:
    """Tell for every property whether it holds, or what differs by how much; returns True if all hold.

    An error of the algorithm's own functions is a difference, too. Raises MarlRayError for an algorithm that learns
    from no play.
    """
    if spec_of(algorithm).pairs:
        raise MarlRayError(
            f"algorithms check: {algorithm} learns from preferred pairs, and the suite's games are played"
        )
    torch.set_num_threads(1)
    own = [each for each in PROPERTIES if each.applies(algorithm)]
    width = max(len(each.name) for each in own)
    all_hold = True
    with process_group():
        for each in own:
            try:
                difference = each.differs(algorithm)
            except Exception as error:
                difference = f"{type(error).__name__}: {one_line(error)}"
            all_hold &= difference is None
            tell(f"{each.name:<{width}}  {difference or f'passed: {each.text}'}")
    return all_hold
