"""Numbers of a sweep's report: curves over seeds, who is better than whom, which keys matter. No Ray in here.

Agarwal et al. 2021 (arXiv 2108.13264) for interquartile means with bootstrap intervals and the probability of improvement.
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

RESAMPLES = 2000
CONFIDENCE = 0.95
LEAST_TRIALS = 4
"""Trials with a result, below which nothing is said about the importance of keys."""
TOP = 0.25
"""Importance is that of getting into this best part of the trials."""


@dataclass(frozen=True)
class Curve:
    """One metric of one trial."""

    steps: np.ndarray
    """(points,) environment steps of each seed, increasing."""
    seeds: np.ndarray
    """(seeds, points) the metric of each seed, averaged over the metric's window."""

    def at(self, steps: float) -> np.ndarray:
        """(seeds,) the last values until so many steps, or the first there are."""
        found: np.ndarray = self.seeds[:, max(0, int(np.searchsorted(self.steps, steps, side="right")) - 1)]
        return found


def curve_of(rows: Sequence[Mapping[str, float]], seeds: Sequence[int], metric: MetricConfig) -> Curve | None:
    """The curve in a trial's rows, from where every seed has a value; None where there is none.

    An exploit begins a new window, and takes the place of what was played beyond its steps.
    """
    windows: dict[int, deque[float]] = {seed: deque(maxlen=metric.window) for seed in seeds}
    points: list[tuple[float, list[float]]] = []
    taken = 0.0
    for row in rows:
        if row.get("exploits", 0) != taken:
            taken = row["exploits"]
            for window in windows.values():
                window.clear()
        reported = False
        for seed, window in windows.items():
            value = row.get(f"seed-{seed}/{metric.name}", math.nan)
            if math.isfinite(value):
                window.append(value)
                reported = True
        if not reported or not all(windows.values()):
            continue  # between evaluations nothing is known
        while points and points[-1][0] >= row["steps"]:
            points.pop()
        points.append((row["steps"], [float(np.mean(window)) for window in windows.values()]))
    if not points:
        return None
    return Curve(np.array([at for at, _ in points]), np.array([values for _, values in points]).T)


def bands(curve: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(points,) interquartile mean over the seeds, and its percentile interval: low and high. Seeds are drawn anew as
    whole curves; of one seed all three are equal."""
    drawn = np.random.default_rng(0).integers(len(curve.seeds), size=(RESAMPLES, len(curve.seeds)))
    middle = trim_mean(curve.seeds, 0.25, axis=0)
    if len(curve.seeds) == 1:
        return middle, middle, middle
    quantiles = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    # In slices of points, for the memory's sake.
    cuts = [curve.seeds[:, k : k + 64][drawn] for k in range(0, curve.seeds.shape[1], 64)]
    found = [np.quantile(trim_mean(cut, 0.25, axis=1), quantiles, axis=0) for cut in cuts]
    low, high = np.concatenate(found, axis=1)
    return middle, low, high


def thinned(curve: Curve, most: int) -> Curve:
    """At most so many points of a curve, the last one among them."""
    if len(curve.steps) <= most:
        return curve
    chosen = np.linspace(0, len(curve.steps) - 1, most).round().astype(int)
    return Curve(curve.steps[chosen], curve.seeds[:, chosen])


def end_of(curve: Curve) -> BootstrapInterval:
    """Where a curve ends."""
    middle, low, high = bands(Curve(curve.steps[-1:], curve.seeds[:, -1:]))
    return BootstrapInterval(iqm(middle), float(low[0]), float(high[0]))


def probability_of_improvement(ours: np.ndarray, theirs: np.ndarray) -> BootstrapInterval:
    """Probability that a seed of ours scores more than a seed of theirs; a tie counts one half (Agarwal et al. 2021,
    section 4.3, with one task). Both are (seeds,), greater is better; the interval is a percentile bootstrap's."""
    wins = (ours[:, None] > theirs[None, :]) + 0.5 * (ours[:, None] == theirs[None, :])
    rng = np.random.default_rng(0)
    rows = rng.integers(len(ours), size=(RESAMPLES, len(ours)))
    columns = rng.integers(len(theirs), size=(RESAMPLES, len(theirs)))
    drawn = wins[rows[:, :, None], columns[:, None, :]].mean(axis=(1, 2))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return BootstrapInterval(float(wins.mean()), float(low), float(high))


def improvement(ours: Curve, theirs: Curve, metric: MetricConfig) -> BootstrapInterval:
    """Probability of improvement at the steps that both have reached."""
    steps, sign = min(ours.steps[-1], theirs.steps[-1]), 1 if metric.mode == "max" else -1
    return probability_of_improvement(sign * ours.at(steps), sign * theirs.at(steps))


def differ(ours: Curve, theirs: Curve) -> bool:
    """Whether the rank-sum test (Mann and Whitney 1947) tells the two apart, at the steps that both have reached and a
    level of 1 - CONFIDENCE. It needs four seeds for that, where the bootstrap of two seeds is sure of anything."""
    steps = min(ours.steps[-1], theirs.steps[-1])
    return bool(mannwhitneyu(ours.at(steps), theirs.at(steps)).pvalue < 1 - CONFIDENCE)


def importances(
    space: Mapping[str, DimensionConfig], trials: Sequence[tuple[Mapping[str, Any], float]]
) -> dict[str, float]:
    """Key -> its share in getting a trial among the best quarter, the greatest first: PED-ANOVA by Optuna (Watanabe et al.
    2023, arXiv 2304.10255). `trials` are (values, score), greater is better. Empty where there is too little to say.
    """
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    if len(trials) < LEAST_TRIALS or len({score for _, score in trials}) < 2:
        return {}
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(direction="maximize")
        for values, score in trials:
            places = {key: _place(space[key], value) for key, value in values.items()}
            kinds = {key: _distribution(space[key]) for key in values}
            study.add_trial(optuna.trial.create_trial(params=places, distributions=kinds, value=score))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the page itself says how much the number of trials allows
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=TOP))
    finally:
        optuna.logging.set_verbosity(before)
    return {key: float(share) for key, share in found.items() if len(_kinds(trials, key)) > 1}


def _kinds(trials: Sequence[tuple[Mapping[str, Any], float]], key: str) -> set[str]:
    return {str(values.get(key)) for values, _ in trials}


def _place(dimension: DimensionConfig, value: Any) -> Any:
    """What Optuna takes: of a list the place, as its entries may be mappings."""
    return value if dimension.values is None else list(dimension.values).index(value)


def _distribution(dimension: DimensionConfig) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.values is not None:
        return CategoricalDistribution(list(range(len(dimension.values))))
    if dimension.int is not None:
        return IntDistribution(*dimension.int)
    assert dimension.bounds is not None
    return FloatDistribution(*dimension.bounds, log=dimension.loguniform is not None)
