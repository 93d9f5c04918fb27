"""Thompson sampling as traffic weights: arms that earn more get more traffic as the evidence grows.

It optimises and proves nothing. Under such weights an arm's plain mean of outcomes is biased (an unlucky start is never
corrected, because traffic leaves). So arms are compared within epochs, in which weights are constant
(`unit_clusters.pool_strata`), or by bets on the chances that were in force (`bets`), which stay exact.
"""

import math
from collections.abc import Mapping

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics.intervals import Summary

PRIOR_WEIGHT = 1.0
"""Weight of the pooled mean in every posterior, in outcomes: an arm without outcomes is like the others, and uncertain."""
QUADRATURE_POINTS = 801
"""Quadrature points per arm, over eight deviations each way."""


def probability_best(arms: Mapping[str, Summary], higher_is_better: bool = True) -> dict[str, float]:
    """Return arm -> posterior probability that its mean is the best; they sum to 1.

    Posteriors are normal: mean of the outcomes and of `PRIOR_WEIGHT` outcomes at the pooled mean, variance s^2 / (n + PRIOR)
    with s^2 of the arm, or pooled while the arm has fewer than two outcomes or all equal. The integral of
    prod_{j != i} F_j dF_i goes over the union of all arms' points, so that very unequal widths keep their shape; its
    error is below 1e-4 (tested). Arms that are all unknown are equally likely.
    Raises MarlRayError without any arm.
    """
    if not arms:
        raise MarlRayError("arms: expected at least one")
    total = sum(arm.n for arm in arms.values())
    sign = 1.0 if higher_is_better else -1.0
    pooled = math.fsum(arm.n * arm.mean for arm in arms.values() if arm.n) / total if total else 0.0
    within = math.fsum((arm.n - 1) * arm.variance for arm in arms.values() if arm.n > 1)
    between = math.fsum(arm.n * (arm.mean - pooled) ** 2 for arm in arms.values() if arm.n)
    pooled_variance = (within + between) / (total - 1) if total > 1 else 0.0
    if not pooled_variance > 0:
        return {name: 1 / len(arms) for name in arms}
    means, deviations = [], []
    for arm in arms.values():
        weight = arm.n + PRIOR_WEIGHT
        means.append(sign * ((arm.n * arm.mean if arm.n else 0.0) + PRIOR_WEIGHT * pooled) / weight)
        deviations.append(
            math.sqrt((arm.variance or pooled_variance) / weight if arm.n > 1 else pooled_variance / weight)
        )
    chances = _chances_of_largest(np.array(means), np.array(deviations))
    return dict(zip(arms, chances.tolist(), strict=True))


def _chances_of_largest(means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """Return (K,) chances that each of K independent normals is the largest."""
    from scipy.special import ndtr

    z = np.linspace(-8, 8, QUADRATURE_POINTS)
    points = np.sort((means[:, None] + deviations[:, None] * z).ravel())
    below = ndtr((points - means[:, None]) / deviations[:, None])
    chances = np.empty(len(means))
    for i in range(len(means)):
        others = np.delete(below, i, axis=0).prod(0)
        chances[i] = ((others[1:] + others[:-1]) / 2 * np.diff(below[i])).sum()
    chances /= chances.sum()
    return chances


def thompson_weights(arms: Mapping[str, Summary], floor: float, higher_is_better: bool = True) -> dict[str, float]:
    """Return arm -> share of the next epoch's traffic, which follows the chance that the arm is best.

    No share is below `floor`. The shares are those that Thompson sampling (Russo et al., arXiv 1707.02038) draws on
    average under the current posteriors. The floor bounds inverse propensities by 1 / floor and lets every arm come
    back. Shares sum to 1. Raises MarlRayError for a floor that the arms cannot all have.
    """
    if not 0 <= floor * len(arms) <= 1:
        raise MarlRayError(f"floor: expected 0 to 1/{len(arms)}, the number of arms, got {floor}")
    remainder = 1 - floor * len(arms)
    return {name: floor + remainder * chance for name, chance in probability_best(arms, higher_is_better).items()}
