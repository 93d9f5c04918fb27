"""Sharper and honest summaries: CUPED, metrics that are ratios, and several guardrails at once."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics.intervals import Summary


class CupedResult(NamedTuple):
    """Result of CUPED."""

    theta: float
    """Slope of outcome on covariate that all arms share."""
    arms: dict[str, Summary]
    """Summaries of the adjusted outcomes; their differences estimate the same effects as those of the raw outcomes."""


def summarise(values: np.ndarray) -> Summary:
    """Return the count, mean and variance of values (n,); variance 0 below two."""
    n = len(values)
    return Summary(n, float(values.mean()) if n else math.nan, float(values.var(ddof=1)) if n > 1 else 0.0)


def cuped(outcomes: Mapping[str, np.ndarray], covariates: Mapping[str, np.ndarray]) -> CupedResult:
    """Remove from each arm's outcomes (n_arm,) the part that a covariate from before the exposure (n_arm,) explains.

    Deng, Xu, Kohavi, Walker, "Improving the sensitivity of online controlled experiments by utilizing pre-experiment
    data" (WSDM 2013): Y - theta (X - mean X), where the mean is over all arms, which assignment by
    chance makes equal. Theta is pooled within arms, so that an effect of the treatment is not taken for a slope. The
    variance falls by the squared correlation. A covariate that the treatment can change makes this wrong.
    Raises MarlRayError naming the arm whose covariates are not as many as its outcomes.
    """
    for arm, values in outcomes.items():
        if arm not in covariates or len(covariates[arm]) != len(values):
            raise MarlRayError(f"covariates: expected {len(values)} numbers for arm {arm!r}, as many as outcomes")
    filled = [arm for arm, values in outcomes.items() if len(values)]
    squares = math.fsum(float(((covariates[arm] - covariates[arm].mean()) ** 2).sum()) for arm in filled)
    products = math.fsum(float(((covariates[arm] - covariates[arm].mean()) * outcomes[arm]).sum()) for arm in filled)
    theta = products / squares if squares > 0 else 0.0
    centre = float(np.concatenate([covariates[arm] for arm in filled]).mean()) if filled else 0.0
    return CupedResult(theta, {arm: summarise(y - theta * (covariates[arm] - centre)) for arm, y in outcomes.items()})


def ratio_summary(numerators: np.ndarray, denominators: np.ndarray) -> Summary:
    """Summarise the ratio of two sums, such as errors per step, whose events belong to units.

    The ratio R is the sum of `numerators` over that of `denominators`. Both are sums per unit (n,), where the unit is
    what was assigned (a session). Delta method (Deng, Knoblich, Lu, arXiv 1803.06336): R varies like the mean of R +
    (N_i - R D_i) / mean(D). The summary counts units, its mean is R, and its variance that of these terms; every test
    takes it like any other. The approximation is good once no few units dominate R. Raises MarlRayError for sequences
    of unequal length, and for denominators whose sum is not positive.
    """
    n, total = len(numerators), float(denominators.sum())
    if len(denominators) != n:
        raise MarlRayError(f"denominators: expected {n} numbers, as many as numerators, got {len(denominators)}")
    if n and not total > 0:
        raise MarlRayError(f"denominators: expected a positive sum, got {total}")
    if not n:
        return Summary(0, math.nan, 0.0)
    ratio = float(numerators.sum()) / total
    linear = (numerators - ratio * denominators) * (n / total)
    # Their mean is 0 by the choice of R, but for rounding.
    return Summary(n, ratio, float((linear**2).sum() / (n - 1)) if n > 1 else 0.0)


def adjust_holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values of several guardrails, adjusted for their number.

    After that, "<= alpha" errs anywhere with probability alpha at most. Holm's step-down (1979): the k-th smallest of m
    times m - k + 1, never falling. Needs no independence; p-values valid at all times stay so.
    """
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: (p_values[name], name))):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
