"""Statistics in a sweep's report: curves over seeds, chances of improvement, importance of keys.

Nothing here needs Ray. Interquartile means, bootstrap intervals and the probability of improvement follow Agarwal et
al. 2021 (arXiv 2108.13264).
"""

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu, trim_mean

from marl_ray.config.sweep import DimensionConfig, MetricConfig
from marl_ray.evaluation.statistics import BootstrapInterval, iqm
from marl_ray.json_types import JsonMapping

RESAMPLES = 2000
"""Number of resamples of a bootstrap interval; a page has an interval at each of hundreds of points."""
CONFIDENCE = 0.95
"""Confidence of all intervals, and 1 less the level of the rank-sum test: the convention of the field."""
MIN_SEEDS = 4
"""Fewest seeds of each trial with which the rank-sum test can reach the level 1 - CONFIDENCE."""
MIN_TRIALS = 4
"""Fewest trials with a result from which the importance of keys is computed."""
BEST_SHARE = 0.25
"""Part of the trials that counts as the best; a key's importance is its share in getting a trial among them."""


@dataclass(frozen=True)
class Curve:
    """One metric of one trial."""

    steps: np.ndarray
    """(points,) environment steps of each seed, increasing."""
    seeds: np.ndarray
    """(seeds, points) values of the metric per seed, averaged over the metric's window."""

    def at(self, steps: float) -> np.ndarray:
        """Return (seeds,) the last value of each seed until `steps`, or its first value if there is none before."""
        values: np.ndarray = self.seeds[:, max(0, int(np.searchsorted(self.steps, steps, side="right")) - 1)]
        return values


def curve_of(rows: Sequence[Mapping[str, float]], seeds: Sequence[int], metric: MetricConfig) -> Curve | None:
    """Return the curve in a trial's rows; None if no row has a value of every seed.

    The curve begins at the first such row. An exploit begins a new window, and replaces the points beyond its steps.
    """
    windows: dict[int, deque[float]] = {seed: deque(maxlen=metric.window) for seed in seeds}
    points: list[tuple[float, list[float]]] = []
    exploits = 0.0
    for row in rows:
        if row.get("exploits", 0) != exploits:
            exploits = row["exploits"]
            for window in windows.values():
                window.clear()
        reported = False
        for seed, window in windows.items():
            value = row.get(f"seed-{seed}/{metric.name}", math.nan)
            if math.isfinite(value):
                window.append(value)
                reported = True
        if not reported or not all(windows.values()):
            continue  # evaluations report the metric only now and then
        while points and points[-1][0] >= row["steps"]:
            points.pop()
        points.append((row["steps"], [float(np.mean(window)) for window in windows.values()]))
    if not points:
        return None
    return Curve(np.array([at for at, _ in points]), np.array([values for _, values in points]).T)


def interval_bands(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the interquartile mean over the seeds at each point, and its percentile interval.

    Returns the mean, the low end and the high end, (points,) each. The bootstrap draws seeds as whole curves; with
    one seed all three are equal.
    """
    drawn = np.random.default_rng(0).integers(len(curve.seeds), size=(RESAMPLES, len(curve.seeds)))
    middle = trim_mean(curve.seeds, 0.25, axis=0)
    if len(curve.seeds) == 1:
        return middle, middle, middle
    quantiles = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    # In slices of points, to save memory.
    slices = [curve.seeds[:, k : k + 64][drawn] for k in range(0, curve.seeds.shape[1], 64)]
    quantiles_of = [np.quantile(trim_mean(points, 0.25, axis=1), quantiles, axis=0) for points in slices]
    low, high = np.concatenate(quantiles_of, axis=1)
    return middle, low, high


def thin_curve(curve: Curve, max_points: int) -> Curve:
    """Return at most `max_points` points of a curve, the last one among them."""
    if len(curve.steps) <= max_points:
        return curve
    places = np.linspace(0, len(curve.steps) - 1, max_points).round().astype(int)
    return Curve(curve.steps[places], curve.seeds[:, places])


def end_of(curve: Curve) -> BootstrapInterval:
    """Return the interquartile mean and bootstrap interval of a curve's last point."""
    middle, low, high = interval_bands(Curve(curve.steps[-1:], curve.seeds[:, -1:]))
    return BootstrapInterval(iqm(middle), float(low[0]), float(high[0]))


def probability_of_improvement(first: np.ndarray, second: np.ndarray) -> BootstrapInterval:
    """Estimate the probability that a seed of `first` scores more than a seed of `second`.

    A tie counts one half (Agarwal et al. 2021, section 4.3, with one task). Both are (seeds,), greater is better; the
    interval is a percentile bootstrap's.
    """
    wins = (first[:, None] > second[None, :]) + 0.5 * (first[:, None] == second[None, :])
    rng = np.random.default_rng(0)
    rows = rng.integers(len(first), size=(RESAMPLES, len(first)))
    columns = rng.integers(len(second), size=(RESAMPLES, len(second)))
    drawn = wins[rows[:, :, None], columns[:, None, :]].mean(axis=(1, 2))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return BootstrapInterval(float(wins.mean()), float(low), float(high))


def improvement(first: Curve, second: Curve, metric: MetricConfig) -> BootstrapInterval:
    """Return the probability of improvement at the steps that both have reached."""
    steps, sign = min(first.steps[-1], second.steps[-1]), 1 if metric.mode == "max" else -1
    return probability_of_improvement(sign * first.at(steps), sign * second.at(steps))


def differ_by_rank_sum(first: Curve, second: Curve) -> bool:
    """Return True if the rank-sum test (Mann and Whitney 1947) tells two curves apart.

    The test's level is 1 - CONFIDENCE, and the curves are compared at the steps that both have reached. The test needs
    MIN_SEEDS for that; a bootstrap of two seeds would call any difference significant.
    """
    steps = min(first.steps[-1], second.steps[-1])
    return bool(mannwhitneyu(first.at(steps), second.at(steps)).pvalue < 1 - CONFIDENCE)


def difference(first: np.ndarray, second: np.ndarray) -> BootstrapInterval:
    """Return the interquartile mean of `first` less that of `second`, with its percentile interval.

    Both are (seeds,), and the bootstrap draws the seeds of each on their own.
    """
    rng = np.random.default_rng(0)
    drawn = [scores[rng.integers(len(scores), size=(RESAMPLES, len(scores)))] for scores in (first, second)]
    gaps = trim_mean(drawn[0], 0.25, axis=1) - trim_mean(drawn[1], 0.25, axis=1)
    low, high = np.quantile(gaps, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return BootstrapInterval(iqm(first) - iqm(second), float(low), float(high))


def winner_certainty(best: Sequence[tuple[str, Curve]], metric: MetricConfig) -> str:
    """Return a line that says if a test can tell the winner from the other trials.

    `best` are (name, curve), the winner's first and then the next best. The line is about the best of those from
    which the test cannot tell the winner, else about the next best; it is empty if there is one trial.
    """
    if len(best) < 2:
        return ""
    (_, winner), *others = best
    equals = [(name, curve) for name, curve in others if not differ_by_rank_sum(winner, curve)]
    name, other = (equals or others)[0]
    steps, seeds = min(winner.steps[-1], other.steps[-1]), len(winner.seeds)
    gap = difference(winner.at(steps), other.at(steps))
    verdict = f"{'not ' if equals else ''}distinguishable from trial {name}"
    verdict += f" and {len(equals) - 1} more" if len(equals) > 1 else ""
    needed = f" (the test takes {MIN_SEEDS})" if seeds < MIN_SEEDS else ""
    if seeds == 1:  # a bootstrap of one seed has no width, and one pair of seeds no probability
        return f"{verdict}: difference {gap.value:.2g} at {steps:,.0f} steps, 1 seed{needed}"
    return (
        f"{verdict}: difference {gap.value:.2g} ({gap.low:.2g} to {gap.high:.2g}) at {steps:,.0f} steps, "
        f"{seeds} seeds{needed}, probability of improvement {improvement(winner, other, metric).value:.2f}"
    )


def importances(space: Mapping[str, DimensionConfig], trials: Sequence[tuple[JsonMapping, float]]) -> dict[str, float]:
    """Return key -> its share in getting a trial among the best quarter, the greatest first.

    The shares are those of PED-ANOVA by Optuna (Watanabe et al. 2023, arXiv 2304.10255). `trials` are (values,
    score), greater is better. The mapping is empty if there are too few trials or no differences.
    """
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    if len(trials) < MIN_TRIALS or len({score for _, score in trials}) < 2:
        return {}
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize")
        for values, score in trials:
            places = {key: _optuna_value(space[key], value) for key, value in values.items()}
            kinds = {key: _distribution(space[key]) for key in values}
            study.add_trial(optuna.trial.create_trial(params=places, distributions=kinds, value=score))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the page itself says how reliable so few trials are
            shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE))
    finally:
        optuna.logging.set_verbosity(before)
    return {key: float(share) for key, share in shares.items() if len(_distinct_values(trials, key)) > 1}


def _distinct_values(trials: Sequence[tuple[JsonMapping, float]], key: str) -> set[str]:
    return {str(values.get(key)) for values, _ in trials}


def _optuna_value(dimension: DimensionConfig, value: Any) -> Any:
    """Return the value in the form that Optuna takes.

    For a list of values that is its index, because the entries may be mappings.
    """
    return value if dimension.values is None else list(dimension.values).index(value)


def _distribution(dimension: DimensionConfig) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.values is not None:
        return CategoricalDistribution(list(range(len(dimension.values))))
    if dimension.int is not None:
        return IntDistribution(*dimension.int)
    assert dimension.bounds is not None
    return FloatDistribution(*dimension.bounds, log=dimension.loguniform is not None)
