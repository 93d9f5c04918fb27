"""Normalisation over the whole batch of all workers, by moments that workers can add up."""

import torch
from torch import Tensor

ROUNDING_SHARE = 1e-13
"""A variance below this share of the mean square is rounding and no variance: a relative deviation of 3e-7, about the
resolution of float32."""


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return the count, sum and sum of squares of `x` where `mask` is True, (3,) float64.

    `mask` is bool and of the shape of `x`. The caller sums the three over the workers.
    """
    masked = x.detach()[mask].double()
    return torch.stack((mask.sum().double(), masked.sum(), masked.square().sum()))


def standardize(
    x: Tensor,
    mask: Tensor,
    moments: Tensor,
    ddof: int = 0,
    eps: float = 1e-8,
    center: bool = True,
    scale: bool = True,
) -> Tensor:
    """Return (x - mean) / (std + eps) where `mask` is True, 0 elsewhere; shape and dtype of `x`.

        mean = sum / n        std = sqrt((sum of squares - sum^2 / n) / (n - ddof))

    with `moments` = (n, sum, sum of squares) of all workers. ddof 0 is the population's deviation (OpenRLHF), 1 is
    Bessel's (verl, which divides by sqrt(var + 1e-8)). Without `center` the mean is not subtracted, without `scale`
    nothing is divided. Where all values are equal, or there is only one, no deviation is known: nothing is divided, and
    the result is 0 with `center` and `x` without it. The result carries no gradient.
    """
    n, total, squares = moments.to(x.device).unbind()
    mean = total / n.clamp(min=1)
    variance = (squares / n.clamp(min=1) - mean**2) * n / (n - ddof).clamp(min=1)
    varies = variance > ROUNDING_SHARE * squares / n.clamp(min=1)
    deviation = torch.where(varies, variance.clamp(min=0).sqrt() + eps, 1.0)
    result = x.detach()
    if center:
        result = (result - mean) * varies
    if scale:
        result = result / deviation
    return torch.where(mask, result, 0.0).to(x.dtype)
