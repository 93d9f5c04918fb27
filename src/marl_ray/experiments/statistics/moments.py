"""Moments of values, of which those of two sets merge into one."""

import math
from typing import NamedTuple

from marl_ray.experiments.statistics.intervals import NO_OUTCOME, Summary


class Moments(NamedTuple):
    """Moments of values."""

    n: int
    """Number of values."""
    mean: float
    squares: float
    """Sum of the squared deviations from the mean."""
    low: float = math.inf
    """The smallest value."""
    high: float = -math.inf
    """The largest value."""

    def summary(self) -> Summary:
        """Return number, mean and unbiased variance (0 for a single value); NO_OUTCOME for no values."""
        if not self.n:
            return NO_OUTCOME
        return Summary(self.n, self.mean, self.squares / (self.n - 1) if self.n > 1 else 0.0)


NO_MOMENTS = Moments(0, 0.0, 0.0)
"""The moments of no values."""


def merge_moments(left: Moments, right: Moments) -> Moments:
    """Return the moments of both sets of values together (Chan, Golub, LeVeque 1979)."""
    n = left.n + right.n
    if not left.n or not right.n:
        return left if left.n else right
    gap = right.mean - left.mean
    mean = left.mean + gap * right.n / n
    squares = left.squares + right.squares + gap**2 * left.n * right.n / n
    return Moments(n, mean, squares, min(left.low, right.low), max(left.high, right.high))
