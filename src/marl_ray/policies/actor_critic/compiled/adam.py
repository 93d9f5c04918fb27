"""AdamW's step over all weights at once, compiled by numba.

torch's step takes longer than the gradient of a small network.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

F = np.float32
FAST_MATH = {"contract", "nsz", "arcp", "reassoc"}
"""The liberties of the compiler that `kernels.py` takes too; numba's cache notices a change only in this file."""


class AdamSettings(NamedTuple):
    """The settings of AdamW, which stay the same for all steps on a batch."""

    rates: np.ndarray
    """(weights,) float32 learning rates."""
    decays: np.ndarray
    """(weights,) float32 weight decays."""
    max_norm: float
    beta: float
    """Decay of the running mean of the gradient."""
    beta_square: float
    """Decay of the running mean of its square."""
    eps: float


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def adam_step(
    weights: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray, settings: AdamSettings, step: int
) -> float:
    """Clip the gradient by its norm, take step number `step` (from 1) of AdamW in place, and return the norm.

    AdamW is by Loshchilov and Hutter (2019, arXiv 1711.05101). `weights`, `gradient` and the running means `first`, of
    the gradient, and `second`, of its square, are (weights,) float32.
    """
    rates, decays, square = settings.rates, settings.decays, F(0)
    correction, spread = F(1 - settings.beta**step), F(math.sqrt(1 - settings.beta_square**step))
    keep, keep_square, small = F(settings.beta), F(settings.beta_square), F(settings.eps)
    for k in range(len(gradient)):
        square += gradient[k] * gradient[k]
    norm = math.sqrt(square)
    scale = settings.max_norm / (norm + 1e-6)
    factor = F(1) if scale > 1 else F(scale)
    for k in range(len(weights)):
        g = gradient[k] * factor
        first[k] += (F(1) - keep) * (g - first[k])
        second[k] = keep_square * second[k] + (F(1) - keep_square) * g * g
        size = F(np.sqrt(second[k])) / spread + small
        weights[k] = weights[k] * (F(1) - rates[k] * decays[k]) - rates[k] / correction * first[k] / size
    return norm
