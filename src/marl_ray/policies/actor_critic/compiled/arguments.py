"""The arguments of the compiled perceptrons of `kernels.py`.

They are the shape of a network, the terms of PPO's loss, and the decisions of a batch.
"""

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np


class NetworkShape(NamedTuple):
    """The shape of a network."""

    widths: np.ndarray
    """(layers + 1,) int64."""
    norm: bool
    """A layer norm scales and shifts the input, which comes normalised."""
    tanh: bool
    """The hidden layers' activation is tanh, else relu."""
    coded: bool
    """The input is a row of codes, whose first layer is (categories, width) and not (width, inputs)."""
    size: int
    """Weights of the network."""
    row_space: int
    """Numbers that a forward pass keeps for each row."""
    max_product: int
    """Weights of the largest layer that a matrix product computes."""


class NetworkInputs(NamedTuple):
    """The distinct rows that a batch's decisions read, as numbers or as codes; the other array has no rows."""

    rows: np.ndarray
    """(R, D) float32."""
    codes: np.ndarray
    """(R, K) int32."""
    parts: np.ndarray
    """(P,) int32: the rows of the first layer's weights that belong to the codes, one code after another."""
    bounds: np.ndarray
    """(codes + 1,) int64: where each code's `parts` begin, and where the last one's end."""
    numbers: np.ndarray
    """(N,) int64: the number of each decision's row."""


class PPOSettings(NamedTuple):
    """The settings of PPO's loss L.

    L is the mean over the decisions of a minibatch:

        actor     L = -min(r A, clip(r, low, high) A) - c H           r = p_a / p_old, H = -sum_k p_k log p_k
        critic    L = w max(h(v - R), h(v_c - R))                     v_c = v_old + clip(v - v_old, -value_clip, value_clip)

    with the probabilities p = softmax(z) of the logits z, the action a, the advantage A, the return R, the value v, the
    Huber loss h, and the weights c (`entropy_coef`) and w (`value_coef`). For A < 0 the dual clip bounds the actor's first
    term by -dual_clip A. The log of r is clipped to 20 on both sides.
    """

    low: float
    high: float
    dual_clip: float
    """0 for none."""
    value_clip: float
    """0 for none."""
    huber_delta: float
    value_coef: float
    entropy_coef: float
    decisions: float
    """Number of decisions of the minibatch over all workers."""


class DecisionArrays(NamedTuple):
    """The decisions of a batch, (N,) each."""

    actions: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    old_values: np.ndarray
    heads: np.ndarray
    """int64: the critic's output that is a decision's value."""


def of_vectors(rows: np.ndarray) -> NetworkInputs:
    """Return the inputs of rows (N, D) float32, each read by one decision."""
    nothing = np.empty(0, np.int32)
    return NetworkInputs(rows, np.empty((0, 0), np.int32), nothing, np.zeros(1, np.int64), np.arange(len(rows)))


def layout(widths: list[int], norm: bool, tanh: bool, coded: bool) -> NetworkShape:
    """Return the shape of a network with these widths."""
    products = [a * b for a, b in itertools.pairwise(widths)]
    size = sum(products) + sum(widths[1:]) + 2 * widths[0] * norm
    space, dense = sum(widths[1:]) + widths[0] * norm, products[coded:]
    return NetworkShape(np.array(widths, np.int64), norm, tanh, coded, size, space, max(dense))


@cache
def limit_blas_threads() -> None:
    """Let BLAS multiply in the calling thread.

    Products as small as these take many times as long in several threads. torch's own products are by MKL, which
    this leaves alone.
    """
    import scipy.linalg.cython_blas  # noqa: F401  numba takes its BLAS from here, and only a loaded one is limited
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")
