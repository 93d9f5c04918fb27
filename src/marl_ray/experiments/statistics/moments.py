"""Moments of values: number, mean, squared deviations, smallest and largest; those of two sets merge into one."""

import math
from typing import NamedTuple

from marl_ray.experiments.statistics.intervals import NO_OUTCOME, Summary


class Moments(NamedTuple):
    """Moments of values: their number, mean, sum of squared deviations from the mean, smallest and largest."""

    n: int
    mean: float
    squares: float
    low: float = math.inf
    high: float = -math.inf

    def summary(self) -> Summary:
        if not self.n:
            return NO_OUTCOME
        return Summary(self.n, self.mean, self.squares / (self.n - 1) if self.n > 1 else 0.0)


NONE = Moments(0, 0.0, 0.0)


def merged(one: Moments, other: Moments) -> Moments:
    """The moments of both sets of values together (Chan, Golub, LeVeque 1979)."""
    n = one.n + other.n
    if not one.n or not other.n:
        return one if one.n else other
    gap = other.mean - one.mean
    mean = one.mean + gap * other.n / n
    squares = one.squares + other.squares + gap**2 * one.n * other.n / n
    return Moments(n, mean, squares, min(one.low, other.low), max(one.high, other.high))
