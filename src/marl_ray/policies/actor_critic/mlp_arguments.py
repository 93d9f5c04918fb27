"""The arguments of the compiled perceptrons of `mlp_kernels.py`: the shape of a network, the terms of PPO's loss, and the
decisions of a batch."""

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
    size: int
    """Weights of the network."""


class PPOTerms(NamedTuple):
    """The settings of the loss."""

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


def layout(widths: list[int], norm: bool, tanh: bool) -> NetworkShape:
    """The layout of a network with these widths."""
    products = [a * b for a, b in itertools.pairwise(widths)]
    size = sum(products) + sum(widths[1:]) + 2 * widths[0] * norm
    return NetworkShape(np.array(widths, np.int64), norm, tanh, size)


@cache
def limit_blas_threads() -> None:
    """Let BLAS multiply in the calling thread: products as small as these take many times as long in several. torch's
    own products are by MKL, which this leaves alone."""
    import scipy.linalg.cython_blas  # noqa: F401  numba takes its BLAS from here, and only a loaded one is limited
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")
