"""The normalisers of values and cost values.

They follow the critics' targets from batch to batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.value_norm import ValueNorm


def update_norms(norms: Sequence[ValueNorm], all_moments: Tensor) -> tuple[ValueNorm, ...]:
    """Update normalisers with a batch's targets, given the moments (K, 3) of these over all workers.

    A batch without decisions moves none.
    """
    pairs = zip(norms, all_moments.tolist(), strict=True)
    return tuple(norm.add_batch(total / n, square / n) if n else norm for norm, (n, total, square) in pairs)


def denormalize(norms: Sequence[ValueNorm], values: Tensor) -> Tensor:
    """Convert (B, T, K) from units of each signal's normaliser to units of the cost."""
    return torch.stack([norm.denormalize(column) for norm, column in zip(norms, values.unbind(-1), strict=True)], -1)


def normalize(norms: Sequence[ValueNorm], values: Tensor) -> Tensor:
    """Convert (B, T, K) from units of the cost to units of each signal's normaliser."""
    return torch.stack([norm.normalize(column) for norm, column in zip(norms, values.unbind(-1), strict=True)], -1)
