"""Small networks over vectors or categories, evaluated by compiled code; other networks have none and stay with torch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from marl_ray.policies.actor_critic.compiled.arguments import (
    NO_CODES,
    NO_ROWS,
    NetworkShape,
    layout,
    limit_blas_threads,
)
from marl_ray.policies.actor_critic.networks import Network, OneHotLinear, VectorLinear

LARGEST = 50_000
"""Most weights in the matrix products of a network for which compiled code is faster than torch, whose products of large
matrices are. A layer over categories is no such product."""


def is_small(network: Network | None) -> bool:
    """True if there is compiled code for the network: a small perceptron of float32 over vectors or categories."""
    if network is None or not isinstance(network.first, VectorLinear | OneHotLinear):
        return False
    dense = network.rest if isinstance(network.first, OneHotLinear) else network
    return sum(parameter.numel() for parameter in dense.parameters()) <= LARGEST and all(
        parameter.dtype is torch.float32 for parameter in network.parameters()
    )


def layout_of(network: Network) -> NetworkShape:
    """The layout of a network that `is_small`."""
    first, linear = network.first, [layer for layer in network.rest if isinstance(layer, nn.Linear)]
    tanh = isinstance(network.rest[0], nn.Tanh)
    if isinstance(first, OneHotLinear):
        return layout([*first.weight.shape, *(layer.out_features for layer in linear)], False, tanh, True)
    assert isinstance(first, VectorLinear)
    widths = [first.linear.in_features, first.linear.out_features, *(layer.out_features for layer in linear)]
    return layout(widths, isinstance(first.norm, nn.LayerNorm), tanh, False)


def flat_weights(parameters: Sequence[Tensor]) -> np.ndarray:
    """The weights as one row, a copy."""
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in parameters])


class CompiledNetwork:
    """A small network as it is now; later changes of its weights do not reach it."""

    def __init__(self, network: Network):
        """Take over the weights of a network that `is_small`."""
        limit_blas_threads()
        self.layout, self.weights = layout_of(network), flat_weights(list(network.parameters()))
        self.offsets: np.ndarray | None = None
        """(K,) int32: the number of the first weight row of each category; None for vectors."""
        if isinstance(network.first, OneHotLinear):
            self.offsets = network.first.offsets.numpy().astype(np.int32)

    def outputs(self, rows: np.ndarray) -> np.ndarray:
        """Outputs (N, out) float32 from raw rows (N, D): float32, or integers for categories."""
        from marl_ray.policies.actor_critic.compiled.kernels import evaluate
        from marl_ray.policies.actor_critic.compiled.rows import coded_rows

        width = int(self.layout.widths[-1])
        if self.offsets is None:
            outputs = np.empty((len(rows), width), np.float32)
            evaluate(self.weights, self.layout, np.ascontiguousarray(rows), NO_CODES, outputs)
            return outputs
        codes, numbers = coded_rows(np.ascontiguousarray(rows), self.offsets)
        outputs = np.empty((len(codes), width), np.float32)
        evaluate(self.weights, self.layout, NO_ROWS, codes, outputs)
        return outputs[numbers]

    def infer(self, rows: Tensor) -> Tensor:
        """Outputs (N, out) from raw rows (N, D), as `Network.infer` computes them."""
        return torch.from_numpy(self.outputs(rows.numpy() if self.layout.coded else rows.float().numpy()))

    def act(
        self, rows: np.ndarray, noise: np.ndarray, allowed: np.ndarray | None, greedy: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions (N,) from 0 and their log-probabilities, of one categorical, as `Categorical.sample` draws them.

        Uniforms are (N,) float64; `allowed` (N, A) bool; rows in `greedy` (N,) take the most likely action.
        """
        from marl_ray.policies.actor_critic.compiled.kernels import act

        outputs = self.outputs(rows)
        actions, log_probs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        masks = np.empty((0, outputs.shape[1]), bool) if allowed is None else allowed
        act(outputs, masks, noise, greedy, actions, log_probs)
        return actions, log_probs
