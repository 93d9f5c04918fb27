"""Parts that the off-policy estimates of acts and of texts share: the result, its gate, and a model."""

import math
from dataclasses import dataclass

import numpy as np

from marl_ray.experiments.statistics.off_policy import ExposureGate, PolicyValue, exposure_gate

FOLDS = 5
"""Number of parts across which the model of the doubly robust estimate is fitted."""
RIDGE = 1.0
"""Penalty on the squared coefficients, for features of variance one and weights of mean one."""
MAX_FEATURES = 256
"""Maximum number of features of a unit's start; wider starts are projected onto this many random directions."""
MAX_ERRORS, WEIGHT_TOLERANCE = 3.0, 0.01
"""Maximum distance of the mean weight from 1, in its standard errors, and the tolerance for float32 log-probabilities."""


@dataclass(frozen=True)
class OffPolicyEstimate:
    """Estimates of a bundle's outcome from logged units, and the decision whether it may be exposed."""

    value: PolicyValue
    """Self-normalised importance sampling; the gate reads this value."""
    doubly_robust: PolicyValue
    """A second estimate of the same number. If it differs from `value` by more than their errors, trust neither."""
    logged: float
    """Mean outcome of the used units, as they were served."""
    units: int
    """Number of units used."""
    greedy_units: int
    """Number of units that were left out, because an agent acted greedily or wrote a text that was not drawn from its
    model's full distribution."""
    gate: ExposureGate


def combine_estimates(
    value: PolicyValue, robust: PolicyValue, outcomes: np.ndarray, used: np.ndarray, floor: float, min_effective: float
) -> OffPolicyEstimate:
    """Combine two estimates on the units `used`, (units,) bool, into one result."""
    units = int(used.sum())
    gate = _gate(value, units, floor, min_effective)
    return OffPolicyEstimate(value, robust, float(outcomes[used].mean()), units, len(used) - units, gate)


def _gate(value: PolicyValue, units: int, floor: float, min_effective: float) -> ExposureGate:
    """Apply `experiments.statistics.off_policy.exposure_gate` after a test that the mean weight is 1.

    A self-normalised estimate alone does not show that the log lacks the bundle's actions: if all weights are equally
    small, the estimate is the logged mean. The standard error follows from the effective sample size, mean sqrt(1 /
    effective - 1 / n).
    """
    variance = max(0.0, 1 / max(value.effective, 1.0) - 1 / units)
    if not abs(value.mean_weight - 1) <= MAX_ERRORS * value.mean_weight * math.sqrt(variance) + WEIGHT_TOLERANCE:
        reason = f"mean importance weight {value.mean_weight:.3g}, must be about 1: the log does not cover this bundle"
        return ExposureGate(False, reason)
    return exposure_gate(value, floor=floor, min_effective=min_effective)


def cross_fit(features: np.ndarray, outcomes: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """Predict the outcomes (n,) from features (n, D) by ridge regressions that did not see them.

    Rows weigh as their importance weights; with fewer rows than folds the prediction is 0.
    """
    n = len(outcomes)
    if n < FOLDS:
        return np.zeros(n)
    deviation = features.std(0)
    scaled = (features - features.mean(0)) / np.where(deviation > 0, deviation, 1.0)
    fold = np.random.default_rng(0).permutation(n) % FOLDS
    predicted = np.zeros(n)
    for number in range(FOLDS):
        fitted, held = fold != number, fold == number
        weights = np.exp(log_weights[fitted] - log_weights[fitted].max())
        weights *= len(weights) / weights.sum()
        mean_x, mean_y = weights @ scaled[fitted] / len(weights), weights @ outcomes[fitted] / len(weights)
        centered = scaled[fitted] - mean_x
        gram = centered.T @ (centered * weights[:, None]) + RIDGE * np.eye(features.shape[1])
        slope = np.linalg.solve(gram, centered.T @ (weights * (outcomes[fitted] - mean_y)))
        predicted[held] = mean_y + (scaled[held] - mean_x) @ slope
    return predicted
