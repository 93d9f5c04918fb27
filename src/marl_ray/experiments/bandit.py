"""Traffic by Thompson sampling, for arms that have already been shown safe, and means that survive it.

Weights follow the evidence, so an arm's plain mean of outcomes is biased (an unlucky start is never corrected, because
traffic leaves). `ipw_mean` is not, given the propensities that were in force: which is why exposures log them.
"""

import math
from collections.abc import Mapping

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics import Summary

PRIOR = 1.0
"""Outcomes' worth of the pooled mean in every posterior: an arm with no outcome is like the others, and uncertain."""
POINTS = 801
"""Quadrature points per arm, over eight deviations each way."""


def probability_best(arms: Mapping[str, Summary], higher_is_better: bool = True) -> dict[str, float]:
    """Arm -> posterior probability that its mean is the best; they sum to 1.

    Posteriors are normal: mean of the outcomes and of `PRIOR` outcomes at the pooled mean, variance s^2 / (n + PRIOR)
    with s^2 of the arm, or pooled while the arm has fewer than two outcomes or all equal. The integral of
    prod_{j != i} F_j dF_i goes over the union of all arms' points, so that very unequal widths keep their shape; its
    error is below 1e-4 (tested). Arms that are all unknown are equally likely.
    """
    if not arms:
        raise MarlRayError("arms: expected at least one")
    total = sum(arm.n for arm in arms.values())
    sign = 1.0 if higher_is_better else -1.0
    pooled = math.fsum(arm.n * arm.mean for arm in arms.values() if arm.n) / total if total else 0.0
    inner = math.fsum((arm.n - 1) * arm.variance for arm in arms.values() if arm.n > 1)
    outer = math.fsum(arm.n * (arm.mean - pooled) ** 2 for arm in arms.values() if arm.n)
    spread = (inner + outer) / (total - 1) if total > 1 else 0.0
    if not spread > 0:
        return {name: 1 / len(arms) for name in arms}
    means, deviations = [], []
    for arm in arms.values():
        weight = arm.n + PRIOR
        means.append(sign * ((arm.n * arm.mean if arm.n else 0.0) + PRIOR * pooled) / weight)
        deviations.append(math.sqrt((arm.variance or spread) / weight if arm.n > 1 else spread / weight))
    chances = _chances_of_largest(np.array(means), np.array(deviations))
    return dict(zip(arms, chances.tolist(), strict=True))


def _chances_of_largest(means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """(K,) chances that each of K independent normals is the largest."""
    from scipy.special import ndtr

    z = np.linspace(-8, 8, POINTS)
    points = np.sort((means[:, None] + deviations[:, None] * z).ravel())
    below = ndtr((points - means[:, None]) / deviations[:, None])
    chances = np.empty(len(means))
    for i in range(len(means)):
        others = np.delete(below, i, axis=0).prod(0)
        chances[i] = ((others[1:] + others[:-1]) / 2 * np.diff(below[i])).sum()
    return chances / chances.sum()


def thompson_weights(arms: Mapping[str, Summary], floor: float, higher_is_better: bool = True) -> dict[str, float]:
    """Arm -> share of the next epoch's traffic: the chance that the arm is best, and no arm below `floor`.

    What Thompson sampling (Russo et al., arXiv 1707.02038) would draw on average while the posteriors stand. The floor
    bounds inverse propensities by 1 / floor and lets every arm come back. Shares sum to 1.
    """
    if not 0 <= floor * len(arms) <= 1:
        raise MarlRayError(f"floor: expected 0 to 1/{len(arms)}, the number of arms, got {floor}")
    rest = 1 - floor * len(arms)
    return {name: floor + rest * chance for name, chance in probability_best(arms, higher_is_better).items()}


def ipw_mean(assigned: np.ndarray, outcomes: np.ndarray, propensities: np.ndarray) -> Summary:
    """One arm's mean outcome under adaptive weights, over all n units in time order.

    `assigned` (n,) bool: the unit got this arm. `outcomes` (n,): read only there. `propensities` (n,): the chance of
    this arm when the unit was assigned, whichever arm it got. Each unit scores

        g_t = m_{t-1} + A_t (Y_t - m_{t-1}) / e_t

    with m the arm's inverse-propensity-weighted running mean, so scores have the arm's mean given all that came before
    (Hadad, Hirshberg, Zhan, Wager, Athey, arXiv 1911.02768). The summary is of the scores: unbiased, and
    its variance over n is the estimate's. Before the arm's first outcome m is 0.
    """
    n = len(assigned)
    if len(outcomes) != n or len(propensities) != n:
        raise MarlRayError(f"outcomes, propensities: expected {n} each, got {len(outcomes)} and {len(propensities)}")
    if n and not (propensities.min() > 0 and propensities.max() <= 1):
        raise MarlRayError("propensities: expected numbers above 0, up to 1")
    if not n:
        return Summary(0, math.nan, 0.0)
    weights = np.where(assigned, 1 / propensities, 0.0)
    values = np.where(assigned, outcomes, 0.0)
    mass = np.concatenate([[0.0], weights.cumsum()[:-1]])
    sums = np.concatenate([[0.0], (weights * values).cumsum()[:-1]])
    centre = np.divide(sums, mass, out=np.zeros(n), where=mass > 0)
    scores = centre + weights * (values - centre)
    return Summary(n, float(scores.mean()), float(scores.var(ddof=1)) if n > 1 else 0.0)
