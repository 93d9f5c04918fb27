"""Actions drawn from logits by compiled code, as `Categorical.sample` draws them."""

import math

import numba
import numpy as np

F = np.float32
FORBIDDEN_LOGIT = F(-1e9)
"""That of distributions.py, to which a test compares it; numba's cache on disk would not notice that it changed there."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def normalize(row: np.ndarray) -> None:
    """Turn logits (A,) into log-probabilities, in place."""
    peak, total = row[0], F(0)
    for x in row:
        peak = max(peak, x)
    for j in range(len(row)):
        row[j] -= peak
        total += F(math.exp(row[j]))
    for j in range(len(row)):
        row[j] -= F(math.log(total))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def act(
    outputs: np.ndarray,
    allowed: np.ndarray,
    noise: np.ndarray,
    greedy: np.ndarray,
    actions: np.ndarray,
    log_probs: np.ndarray,
) -> None:
    """Draw actions (N,) and their log-probabilities from logits (N, A), which become log-probabilities, and uniforms (N,).

    Like `Categorical.sample` it inverts the distribution function in float64, scaled by the rounded sum. `allowed` is (N,
    A), or (0, A) for all choices; rows in `greedy` (N,) take the most likely action.
    """
    for i in range(len(outputs)):
        row = outputs[i]
        if len(allowed):
            for j in range(len(row)):
                if not allowed[i, j]:
                    row[j] = FORBIDDEN_LOGIT
        normalize(row)
        choice = 0
        if greedy[i]:
            for j in range(len(row)):
                if row[j] > row[choice]:
                    choice = j
        else:
            total = F(0)
            for x in row:
                total += F(math.exp(x))
            level, edge = noise[i] * np.float64(total), F(0)
            for j in range(len(row) - 1):
                edge += F(math.exp(row[j]))
                choice += level >= np.float64(edge)
        actions[i], log_probs[i] = choice, row[choice]
