"""Statistics of runs and benchmarks: interquartile means, bootstrap intervals, the JSON of marl-eval.

The interquartile mean and its intervals follow Agarwal et al. 2021 (arXiv 2108.13264); the protocol and the file follow
Gorsane et al. 2022 (arXiv 2209.10485).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import trim_mean

from marl_ray.errors import MarlRayError

RESAMPLES = 10_000
"""Number of samples that a bootstrap interval is made of."""
_CHUNK = 500
"""Number of resamples drawn at a time, to save memory."""


class BootstrapInterval(NamedTuple):
    """A value with a confidence interval."""

    value: float
    low: float
    high: float


def iqm(scores: np.ndarray) -> float:
    """Return the mean of the middle half of all scores, whatever their shape."""
    return float(trim_mean(np.asarray(scores, float).reshape(-1), 0.25))


def stratified_bootstrap(
    scores: np.ndarray, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> BootstrapInterval:
    """Return `iqm` of scores (runs, tasks) with its percentile interval, whose resamples draw runs within each task."""
    scores = np.asarray(scores, float)
    runs, tasks = scores.shape
    run_numbers = np.random.default_rng(seed).integers(runs, size=(resamples, runs, tasks))
    drawn = np.sort(scores[run_numbers, np.arange(tasks)].reshape(resamples, -1), axis=1)
    means = trim_mean(drawn, 0.25, axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return BootstrapInterval(iqm(scores), float(low), float(high))


def problem_bootstrap(
    groups: Sequence[np.ndarray], weights: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> BootstrapInterval:
    """Return the weighted mean of the groups' means, with its percentile bootstrap interval over problems.

    A group is a benchmark: (problems,) scores in [0, 1]. Each resample draws problems within each group. Weights are
    relative. The interval shows how much the value depends on the choice of problems; if all scores are equal it has no
    width. Raises MarlRayError for a group without problems, for a weight that is negative or not finite, and for
    weights that add up to 0.
    """
    scores = [np.asarray(group, float) for group in groups]
    share = np.asarray(weights, float)
    weighted = np.isfinite(share).all() and (share >= 0).all() and share.sum() > 0
    if not weighted or any(not len(group) for group in scores):
        raise MarlRayError(
            "aggregate: expected evaluations with problems, and finite weights that add up to more than 0"
        )
    share = share / share.sum()
    value = float(sum(part * group.mean() for part, group in zip(share, scores, strict=True)))
    generator, means = np.random.default_rng(seed), np.zeros(RESAMPLES)
    for part, group in zip(share, scores, strict=True):
        for begin in range(0, RESAMPLES, _CHUNK):
            drawn = group[generator.integers(len(group), size=(_CHUNK, len(group)))]
            means[begin : begin + _CHUNK] += part * drawn.mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return BootstrapInterval(value, float(low), float(high))


def marl_eval_document(
    environment: str, task: str, algorithm: str, runs: Sequence[Sequence[tuple[int, Mapping[str, Sequence[float]]]]]
) -> dict[str, object]:
    """Convert runs to the JSON of marl-eval.

    Each run is a list of (environment steps, metric -> value of every episode).
    """
    shaped = {
        f"run_{k}": {f"step_{j}": {"step_count": steps, **metrics} for j, (steps, metrics) in enumerate(run)}
        for k, run in enumerate(runs)
    }
    return {environment: {task: {algorithm: shaped}}}
