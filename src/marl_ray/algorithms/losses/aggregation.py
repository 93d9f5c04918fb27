"""Weights that turn per-token losses into one number.

The number is sum(weights * losses) over all workers and micro-batches. Because the weights hold the global counts, that
sum does not depend on how a minibatch is divided into micro-batches or among workers, and needs no later division.
Where data parallelism averages gradients (DDP, FSDP2), multiply by the number of workers.
"""

from typing import get_args

import torch
from torch import Tensor

from marl_ray.config.run.hyper import Aggregation
from marl_ray.errors import MarlRayError


def count_tokens_and_sequences(mask: Tensor) -> Tensor:
    """Return the numbers of own tokens and of sequences with at least one, (2,) int64.

    `mask` is (B, T) bool. The caller sums both numbers over the workers.
    """
    return torch.stack((mask.sum(), mask.any(1).sum()))


def loss_weights(
    mask: Tensor,
    mode: Aggregation,
    tokens: Tensor | float,
    sequences: Tensor | float,
    fixed_length: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weights (B, T) of the losses at own tokens, 0 elsewhere.

        token-mean            1 / tokens                        DAPO, arXiv 2503.14476, eq. 8
        token-sum             1
        seq-mean-token-sum    1 / sequences
        seq-mean-token-mean   1 / (sequences length)            GRPO, arXiv 2402.03300, eq. 3
        fixed-length          1 / (sequences fixed_length)      Dr. GRPO, arXiv 2503.20783, section 3.2

    `mask` (B, T) bool; length is a sequence's own tokens. `tokens` and `sequences` are what
    `count_tokens_and_sequences` counts in the whole minibatch over all workers; fully masked sequences are in neither.
    `fixed_length` is a constant such as the longest response allowed, in tokens: not the padded width, which differs
    between batches. Raises MarlRayError for an unknown mode and for fixed-length without a positive `fixed_length`.
    """
    tokens, sequences = (torch.as_tensor(n, device=mask.device).double().clamp(min=1) for n in (tokens, sequences))
    lengths = mask.sum(1).double()
    match mode:
        case "token-mean":
            weights = (1 / tokens).expand_as(lengths)
        case "token-sum":
            weights = torch.ones_like(lengths)
        case "seq-mean-token-sum":
            weights = (1 / sequences).expand_as(lengths)
        case "seq-mean-token-mean":
            weights = 1 / (sequences * lengths.clamp(min=1))
        case "fixed-length":
            if not fixed_length or fixed_length < 0:
                raise MarlRayError(f"fixed_length: expected a positive number of tokens, got {fixed_length}")
            weights = (1 / (sequences * fixed_length)).expand_as(lengths)
        case _:
            raise MarlRayError(f"aggregation: expected one of {', '.join(get_args(Aggregation))}, got {mode!r}")
    return weights.to(dtype).unsqueeze(1) * mask
