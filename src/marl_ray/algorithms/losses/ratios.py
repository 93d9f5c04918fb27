"""Importance ratios between the current policy, the one that the update started from and the one that sampled.

All functions take log-probabilities (B, T) in nats, and `mask` (B, T) bool for the policy's own tokens.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Maximum log ratio; its exponential overflows neither in float32 nor in bfloat16."""
GSPO_LIMIT = 10.0
"""Maximum log ratio of a sequence in GSPO, in nats; verl's. Where the advantage is negative, no clip bounds it."""


def token_ratio(log_probs: Tensor, old: Tensor) -> Tensor:
    """Return pi / pi_old per token, (B, T), with gradient.

    The log ratio is held within +-20, beyond which the gradient is 0.
    """
    return (log_probs - old.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_log_ratio(log_probs: Tensor, old: Tensor, mask: Tensor, summed: bool = False) -> Tensor:
    """Return the log ratio of whole sequences, (B,), with gradient, not clamped.

    It is the mean of the log ratios of the sequence's own tokens, so its exponential is the geometric mean of their
    ratios (GSPO, arXiv 2507.18071, eq. 7). With `summed` it is their sum, whose exponential is the true ratio of the
    sequences, which TRL's RLOO uses. A sequence that is fully masked has log ratio 0.
    """
    total = torch.where(mask, log_probs - old.detach(), 0.0).sum(1)
    return total if summed else total / mask.sum(1).clamp(min=1)


def gspo_token_log_ratio(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return log pi - sg(log pi) + sg(sequence log ratio), at most 10; (B, T), 0 where masked.

    GSPO-token (arXiv 2507.18071, eq. 14): every own token has the value of its sequence and a gradient of its own.
    """
    sequence = sequence_log_ratio(log_probs.detach(), old, mask).unsqueeze(1)
    through = torch.where(mask, log_probs - log_probs.detach(), 0.0)
    return torch.where(mask, (through + sequence).clamp(max=GSPO_LIMIT), 0.0)


def truncated_importance(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Return min(pi_old / pi_behaviour, cap) per token, (B, T), without gradient.

    These ratios weigh the loss of tokens whose sampler (an inference engine, a stale copy) differs from the policy that
    trains: truncated importance sampling (Ionides 2008).
    """
    log_ratio = (old - behaviour).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=cap)
