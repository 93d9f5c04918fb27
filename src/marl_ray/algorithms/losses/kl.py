"""Divergence from a reference policy, estimated from the sampled tokens.

See Schulman 2020, "Approximating KL divergence".
"""

from typing import get_args

from torch import Tensor

from marl_ray.algorithms.losses.ratios import LOG_RATIO_LIMIT
from marl_ray.config.run.hyper import KlEstimator
from marl_ray.errors import MarlRayError

K3_LIMIT = 10.0
"""Largest k3 of a token, in nats; verl's. A single token that the policy never writes would otherwise rule the mean."""
CONTROLLER_CLIP = 0.2
"""Largest relative error that the adaptive coefficient follows; that of Ziegler et al. 2019, section 2.2."""


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    """Return the per-token estimate of KL(policy || reference), in nats.

    The estimate has the shape of `log_probs`, and a gradient to them.

        k1   log pi - log ref              unbiased; its expected gradient is 0, so only for rewards
        abs  |log pi - log ref|
        k2   (log pi - log ref)^2 / 2      biased value; its expected gradient is that of the KL
        k3   e^d - d - 1, d = log ref - log pi      unbiased, never negative; gradient of the forward KL
        k1+  value of k1, gradient of k2
        k3+  value of k3, gradient of k2

    The expectations are over tokens of the current policy. For k3, d is held within +-20 and the result at 10 at most, as
    in verl; beyond either limit its gradient is 0. `reference` gets no gradient. Raises MarlRayError for another kind.
    """
    difference = log_probs - reference.detach()
    match kind:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference**2
        case "k3":
            log_ratio = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return (log_ratio.expm1() - log_ratio).clamp(max=K3_LIMIT)
        case "k1+" | "k3+":
            value = kl_estimate(log_probs.detach(), reference, "k1" if kind == "k1+" else "k3")
            gradient = 0.5 * difference**2
            return value + (gradient - gradient.detach())
        case _:
            raise MarlRayError(f"kl_estimator: expected one of {', '.join(get_args(KlEstimator))}, got {kind!r}")


def adaptive_coefficient(coefficient: float, kl: float, target: float, horizon: float, n: int) -> float:
    """Return the KL coefficient after a batch of `n` sequences with mean divergence `kl`.

        c <- c (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. `kl` and `target` have the same unit (nats per token or
    sequence); `horizon` is in sequences. Raises MarlRayError unless target and horizon are positive.
    """
    if target <= 0 or horizon <= 0:
        raise MarlRayError(f"kl_target, kl_horizon: expected positive numbers, got {target} and {horizon}")
    error = min(max(kl / target - 1, -CONTROLLER_CLIP), CONTROLLER_CLIP)
    return coefficient * (1 + error * n / horizon)
