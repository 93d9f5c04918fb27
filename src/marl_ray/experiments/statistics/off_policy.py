"""Off-policy estimates of the reward that a new policy would earn, from exposures of the old ones.

The log holds the chances with which the behaviour policy took its actions; the target policy gives the chances with
which it would take them. An episode's importance weight is w = prod_t pi(a_t | s_t) / b(a_t | s_t). The weights
of long episodes spread over many orders of magnitude, and the effective sample size is the number of episodes that
carry the estimate.
"""

import math
from typing import NamedTuple

import numpy as np

from marl_ray.errors import MarlRayError


class PolicyValue(NamedTuple):
    """Estimated mean reward per episode under the target policy."""

    estimate: float
    error: float
    """Standard error."""
    low: float
    """One-sided lower confidence bound."""
    effective: float
    """Effective sample size, (sum w)^2 / sum w^2 (Kong 1992)."""
    mean_weight: float
    """Mean importance weight: about 1 if the log covers the target's actions and the propensities are right."""


class ExposureGate(NamedTuple):
    """Decision whether the target may be exposed, with the reason."""

    passed: bool
    reason: str


def snips(log_weights: np.ndarray, rewards: np.ndarray, alpha: float) -> PolicyValue:
    """Return the self-normalised importance sampling estimate over n episodes.

    The estimate is sum w r / sum w (Swaminathan, Joachims, NeurIPS 2015); `log_weights` and `rewards` are (n,).
    Variance by the delta method, sum w^2 (r - v)^2 / (sum w)^2. Moves with the rewards (adding 1 to all adds 1), bias
    of order 1 / effective.
    """
    weights, scale = _weights(log_weights, rewards)
    total, effective = float(weights.sum()), _effective_size(weights)
    if not total > 0:
        return PolicyValue(math.nan, math.inf, -math.inf, 0.0, 0.0)
    estimate = float(weights @ rewards) / total
    error = math.sqrt(float(weights**2 @ (rewards - estimate) ** 2)) / total
    return _policy_value(estimate, error, effective, _mean_weight(total / len(weights), scale), alpha)


def doubly_robust(
    log_weights: np.ndarray, rewards: np.ndarray, logged_model: np.ndarray, target_model: np.ndarray, alpha: float
) -> PolicyValue:
    """Return the doubly robust estimate over n episodes.

    The estimate is the mean of target_model + w (r - logged_model). Source: Dudik, Langford, Li, arXiv 1103.4601. All
    arrays are (n,), per episode. `logged_model` is a model's prediction of the reward given the start and the logged
    actions, `target_model` its mean over the target's actions. The estimate is right if the weights are or if the model
    is; the better the model, the smaller the error. The model must not be fitted on these episodes. Raises MarlRayError
    for arrays of another shape than the rewards, or with numbers that are not finite.
    """
    weights, scale = _weights(log_weights, rewards)
    for name, values in {"logged_model": logged_model, "target_model": target_model}.items():
        if values.shape != rewards.shape or not np.isfinite(values).all():
            raise MarlRayError(f"{name}: expected finite numbers of shape {rewards.shape}, got shape {values.shape}")
    n, effective = len(weights), _effective_size(weights)
    if not effective or n < 2:
        return PolicyValue(math.nan, math.inf, -math.inf, effective, 0.0)
    # Unlike a ratio of sums this needs weights on their true scale.
    with np.errstate(over="ignore", invalid="ignore"):
        scores = target_model + np.exp(log_weights) * (rewards - logged_model)
    if not np.isfinite(scores).all():
        return PolicyValue(math.nan, math.inf, -math.inf, effective, math.inf)
    error = math.sqrt(float(scores.var(ddof=1)) / n)
    return _policy_value(float(scores.mean()), error, effective, _mean_weight(float(weights.mean()), scale), alpha)


def exposure_gate(value: PolicyValue, *, floor: float, min_effective: float) -> ExposureGate:
    """Pass only a target whose lower bound is above `floor`, on at least `min_effective` effective episodes."""
    if not value.effective >= min_effective:
        return ExposureGate(False, f"{value.effective:.1f} effective episodes, {min_effective:g} needed")
    if not value.low > floor:
        return ExposureGate(False, f"lower bound {value.low:.6g}, must be above {floor:g}")
    return ExposureGate(
        True, f"lower bound {value.low:.6g} above {floor:g} on {value.effective:.1f} effective episodes"
    )


def _weights(log_weights: np.ndarray, rewards: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the weights divided by the largest one, and its logarithm.

    A product of many ratios would overflow.
    """
    if log_weights.ndim != 1 or log_weights.shape != rewards.shape:
        raise MarlRayError(f"rewards: expected shape {log_weights.shape}, one per episode, got {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise MarlRayError("rewards: expected finite numbers")
    scale = float(log_weights.max(initial=-math.inf))
    if math.isinf(scale):
        return np.zeros(len(log_weights)), 0.0
    return np.exp(log_weights - scale), scale


def _effective_size(weights: np.ndarray) -> float:
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def _mean_weight(scaled: float, scale: float) -> float:
    return math.exp(min(math.log(scaled) + scale, 700.0))


def _policy_value(estimate: float, error: float, effective: float, mean_weight: float, alpha: float) -> PolicyValue:
    if effective <= 2 or not error > 0:
        # Few episodes, or rewards that never differed, say nothing about the error.
        return PolicyValue(estimate, math.inf, -math.inf, effective, mean_weight)
    from scipy.special import stdtrit

    # A t quantile: the error is estimated from about as many numbers as there are effective episodes.
    quantile = float(stdtrit(effective - 1, 1 - alpha))
    return PolicyValue(estimate, error, estimate - quantile * error, effective, mean_weight)
