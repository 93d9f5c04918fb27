"""Statistics of runs: interquartile mean with stratified bootstrap, certified rates, and the marl-eval file shape.

The interquartile mean and its intervals follow Agarwal et al. 2021 (arXiv 2108.13264); the protocol and the file follow
Gorsane et al. 2022 (arXiv 2209.10485).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import trim_mean

from marl_ray.algorithms.constraints.budgets import certified_rate as certified_rate


class BootstrapInterval(NamedTuple):
    """A value with a confidence interval."""

    value: float
    low: float
    high: float


def iqm(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores, whatever their shape."""
    return float(trim_mean(np.asarray(scores, float).reshape(-1), 0.25))


def stratified_bootstrap(
    scores: np.ndarray, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> BootstrapInterval:
    """`iqm` of scores (runs, tasks) with its percentile interval; runs are drawn anew within each task."""
    scores = np.asarray(scores, float)
    runs, tasks = scores.shape
    chosen = np.random.default_rng(seed).integers(runs, size=(resamples, runs, tasks))
    drawn = np.sort(scores[chosen, np.arange(tasks)].reshape(resamples, -1), axis=1)
    means = trim_mean(drawn, 0.25, axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return BootstrapInterval(iqm(scores), float(low), float(high))


def marl_eval(
    environment: str, task: str, algorithm: str, runs: Sequence[Sequence[tuple[int, Mapping[str, Sequence[float]]]]]
) -> dict[str, Any]:
    """Runs as marl-eval's JSON: each run a list of (environment steps, metric -> value of every episode)."""
    shaped = {
        f"run_{k}": {f"step_{j}": {"step_count": steps, **metrics} for j, (steps, metrics) in enumerate(run)}
        for k, run in enumerate(runs)
    }
    return {environment: {task: {algorithm: shaped}}}
