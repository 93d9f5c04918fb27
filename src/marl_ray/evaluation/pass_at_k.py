"""The pass@k estimator, and the values of k that runs report."""

import numpy as np


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples passes, from n samples of which c pass.

    Chen et al. 2021 (arXiv 2107.03374), equation 1, in the official harness' own expression: it agrees to the last bit,
    which `1 - comb(n - c, k) / comb(n, k)` does not. Needs n >= k.
    """
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def values_of_k(samples: int) -> list[int]:
    """Return the values of k for which a run reports pass@k: 1, 2, 4, ... and the number of samples itself."""
    return sorted({samples, *(1 << i for i in range(samples.bit_length()))})
