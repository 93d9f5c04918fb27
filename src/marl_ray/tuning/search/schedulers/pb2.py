"""Population-based bandits (Parker-Holder, Nguyen and Roberts 2020, arXiv 2002.02518).

Exploits as in PBT. The recipient's hyper-parameters x maximise mean + KAPPA * deviation of a Gaussian process over (t, x) of
the score's change per decision interval, with the time-varying kernel

    k((t, x), (t', x')) = exp(-|x - x'|^2 / (2 l^2)) * (1 - epsilon)^(|t - t'| / 2)

on x scaled to [0, 1]. l, epsilon and the noise maximise the marginal likelihood (scipy); the acquisition is maximised over
random candidates. Recipients of one decision point differ by their candidates.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from typing_extensions import override

from marl_ray.config.schedulers import Pb2Settings
from marl_ray.config.sweep import DimensionConfig
from marl_ray.json_types import JsonObject
from marl_ray.tuning.search.schedulers.pbt import PopulationScheduler
from marl_ray.tuning.search.schedulers.protocol import WORST_SCORE, TrialStanding
from marl_ray.tuning.search.spaces import clip_value

CANDIDATES = 512
"""Number of random points at which the acquisition is compared."""
MAX_POINTS = 400
"""Number of the newest observations to which the Gaussian process is fitted."""
KAPPA = 2.0
"""Weight of the deviation in the acquisition; the paper's sqrt(beta)."""
JITTER = 1e-6
"""Added to the noise, so that the kernel's matrix stays positive definite."""


class Pb2Scheduler(PopulationScheduler):
    """PBT whose recipients get the hyper-parameters that a Gaussian process over past changes of the score prefers."""

    Settings = Pb2Settings

    @override
    def explore(self, trials: Mapping[int, TrialStanding], donor: int, at: int, rng: np.random.Generator) -> JsonObject:
        keys = list(self.space)
        times, points, changes = observed_changes(trials, self.space, self.interval)
        candidates = rng.random((CANDIDATES, len(keys)))
        if len(changes) < 2:
            best = candidates[0]
        else:
            best = candidates[int(np.argmax(upper_bounds(times, points, changes, at / self.interval, candidates)))]
        return {key: from_unit(self.space[key], float(share)) for key, share in zip(keys, best, strict=True)}


def observed_changes(
    trials: Mapping[int, TrialStanding], space: Mapping[str, DimensionConfig], interval: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (N,) intervals, (N, D) points in the unit cube, (N,) changes of the score, the MAX_POINTS newest, oldest first.

    A point is the values with which a trial trained in an interval. The change is that of the weights: an interval after a
    takeover began with the donor's score. Intervals with an unknown score are left out.
    """
    rows = []
    for trial in trials.values():
        for at, score in trial.scores.items():
            start = at - interval
            origin = trials.get(trial.donors.get(start, trial.number))  # None if the donor has failed since
            before = None if origin is None else origin.scores.get(start)
            if before is not None and WORST_SCORE not in (before, score):
                values = trial.values_until(at)
                point = [to_unit(dimension, values[key]) for key, dimension in space.items()]
                rows.append((at / interval, point, score - before))
    rows = sorted(rows, key=lambda row: row[0])[-MAX_POINTS:]
    if not rows:
        return np.zeros(0), np.zeros((0, len(space))), np.zeros(0)
    times, points, changes = zip(*rows, strict=True)
    return np.array(times), np.array(points), np.array(changes)


def upper_bounds(
    times: np.ndarray, points: np.ndarray, changes: np.ndarray, now: float, candidates: np.ndarray
) -> np.ndarray:
    """Return (C,) mean + KAPPA * deviation at `candidates` (C, D) and time `now`, from N observations."""
    deviation = changes.std() or 1.0
    y = (changes - changes.mean()) / deviation

    def kernel(theta: np.ndarray, t: np.ndarray, x: np.ndarray, t2: np.ndarray, x2: np.ndarray) -> np.ndarray:
        length, forget = math.exp(theta[0]), 1 / (1 + math.exp(-theta[1]))
        square = ((x[:, None] - x2[None]) ** 2).sum(-1)
        values: np.ndarray = np.exp(-square / (2 * length**2)) * (1 - forget) ** (np.abs(t[:, None] - t2[None]) / 2)
        return values

    def fit(theta: np.ndarray) -> Any:
        noise = math.exp(theta[2]) + JITTER
        return cho_factor(kernel(theta, times, points, times, points) + noise * np.eye(len(y)), lower=True)

    def loss(theta: np.ndarray) -> float:
        factor = fit(theta)
        return float(0.5 * y @ cho_solve(factor, y) + np.log(np.diag(factor[0])).sum())

    bounds = [(math.log(0.05), math.log(3.0)), (-6.0, 2.0), (math.log(1e-4), math.log(1.0))]
    theta = minimize(loss, np.array([math.log(0.5), -3.0, math.log(0.1)]), bounds=bounds, method="L-BFGS-B").x
    factor = fit(theta)
    cross = kernel(theta, np.full(len(candidates), now), candidates, times, points)
    mean = cross @ cho_solve(factor, y)
    variance = np.maximum(1 - (cross * cho_solve(factor, cross.T).T).sum(1), 0.0)
    return np.asarray(mean + KAPPA * np.sqrt(variance))


def to_unit(dimension: DimensionConfig, value: float) -> float:
    """Return a number as its share of the dimension's range."""
    assert dimension.bounds is not None
    low, high = dimension.bounds
    if dimension.loguniform is not None:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def from_unit(dimension: DimensionConfig, share: float) -> Any:
    """Return the number at a share of the dimension's range."""
    assert dimension.bounds is not None
    low, high = dimension.bounds
    if dimension.loguniform is not None:
        return clip_value(dimension, math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return clip_value(dimension, low + share * (high - low))
