"""Values of k for which pass@k is reported, and the uncertainty of pass@k."""

from collections.abc import Mapping, Sequence

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.statistics import BootstrapInterval

RESAMPLES = 10_000
_CHUNK = 500


def possible_ks(counts: Mapping[str, int], wanted: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
    """The values of k to report for these numbers of samples by problem.

    Without `wanted`, they are those of `default` for which every problem has enough samples, as in the official
    harness.
    Raises MarlRayError naming a problem with fewer samples than a wanted k.
    """
    task_id, fewest = min(counts.items(), key=lambda item: item[1])
    if wanted is None:
        return tuple(k for k in default if k <= fewest)
    for k in wanted:
        if k < 1:
            raise MarlRayError(f"--k {k}: expected at least 1")
        if k > fewest:
            raise MarlRayError(f"--k {k}: problem {task_id!r} has only {fewest} sample{'s' * (fewest != 1)}")
    return tuple(sorted(set(wanted)))


def bootstrap(
    groups: Sequence[np.ndarray], weights: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Weighted mean of the groups' means, with its percentile bootstrap interval over problems.

    A group is a benchmark: (problems,) scores in [0, 1], drawn anew within it. Weights are relative. The interval shows
    how much the value depends on the choice of problems; if all scores are equal it has no width.
    """
    scores = [np.asarray(group, float) for group in groups]
    share = np.asarray(weights, float)
    if not scores or any(not len(group) for group in scores) or (share < 0).any() or share.sum() <= 0:
        raise MarlRayError("aggregate: expected evaluations with problems, and weights that add up to more than 0")
    share = share / share.sum()
    value = float(sum(part * group.mean() for part, group in zip(share, scores, strict=True)))
    generator, means = np.random.default_rng(seed), np.zeros(RESAMPLES)
    for part, group in zip(share, scores, strict=True):
        for begin in range(0, RESAMPLES, _CHUNK):
            drawn = group[generator.integers(len(group), size=(_CHUNK, len(group)))]
            means[begin : begin + _CHUNK] += part * drawn.mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return BootstrapInterval(value, float(low), float(high))
