"""Algorithms: pure functions on tensors. One named algorithm per file; shared maths beside."""

from marl_ray.algorithms.base import Algorithm, Losses
from marl_ray.algorithms.ippo import IPPO
from marl_ray.algorithms.mappo import MAPPO

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (IPPO, MAPPO)}

__all__ = ["ALGORITHMS", "Algorithm", "Losses"]
