"""Small networks over vectors or categories, evaluated by compiled code.

Other networks have none and stay with torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from marl_ray.policies.actor_critic.compiled.arguments import NetworkShape, layout, limit_blas_threads, of_vectors
from marl_ray.policies.actor_critic.networks import Network, OneHotLinear, VectorLinear

if TYPE_CHECKING:
    from marl_ray.policies.actor_critic.compiled.rows import Categories

MAX_WEIGHTS = 50_000
"""Maximum number of weights in the matrix products of a network for which compiled code is faster than torch, whose products
of large matrices are. A layer over categories is no such product."""


def is_small(network: Network | None) -> bool:
    """Return True if there is compiled code for the network.

    Such a network is a small perceptron of float32 over vectors or categories.
    """
    if network is None or not isinstance(network.first, VectorLinear | OneHotLinear):
        return False
    dense = network.rest if isinstance(network.first, OneHotLinear) else network
    return sum(parameter.numel() for parameter in dense.parameters()) <= MAX_WEIGHTS and all(
        parameter.dtype is torch.float32 for parameter in network.parameters()
    )


def layout_of(network: Network) -> NetworkShape:
    """Return the layout of a network that `is_small`."""
    first, linear = network.first, [layer for layer in network.rest if isinstance(layer, nn.Linear)]
    tanh = isinstance(network.rest[0], nn.Tanh)
    if isinstance(first, OneHotLinear):
        return layout([*first.weight.shape, *(layer.out_features for layer in linear)], False, tanh, True)
    assert isinstance(first, VectorLinear)
    widths = [first.linear.in_features, first.linear.out_features, *(layer.out_features for layer in linear)]
    return layout(widths, isinstance(first.norm, nn.LayerNorm), tanh, False)


def categories_of(network: Network) -> "Categories | None":
    """Return the categories that a network that `is_small` reads; None for one over vectors."""
    if not isinstance(network.first, OneHotLinear):
        return None
    from marl_ray.policies.actor_critic.compiled.rows import Categories  # loads numba

    return Categories.from_offsets(network.first.offsets.numpy(), len(network.first.weight))


def flat_weights(parameters: Sequence[Tensor]) -> np.ndarray:
    """Return the weights as one row, a copy."""
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in parameters])


class CompiledNetwork:
    """A small network as it is now; later changes of its weights do not reach it."""

    def __init__(self, network: Network):
        """Take over the weights of a network that `is_small`."""
        limit_blas_threads()
        self.layout, self.weights = layout_of(network), flat_weights(list(network.parameters()))
        self.categories = categories_of(network)

    def outputs(self, rows: np.ndarray) -> np.ndarray:
        """Return the outputs (N, out) float32 from raw rows (N, D): float32, or integers for categories."""
        from marl_ray.policies.actor_critic.compiled.kernels import evaluate

        rows = np.ascontiguousarray(rows)
        inputs = of_vectors(rows) if self.categories is None else self.categories.inputs(rows)
        outputs = np.empty((max(len(inputs.rows), len(inputs.codes)), self.layout.widths[-1]), np.float32)
        evaluate(self.weights, self.layout, inputs, outputs)
        return outputs if self.categories is None else outputs[inputs.numbers]

    def infer(self, rows: Tensor) -> Tensor:
        """Return the outputs (N, out) from raw rows (N, D), as `Network.infer` computes them."""
        return torch.from_numpy(self.outputs(rows.numpy() if self.layout.coded else rows.float().numpy()))

    def act(
        self, rows: np.ndarray, noise: np.ndarray, allowed: np.ndarray | None, greedy: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return actions (N,) from 0 of one categorical, and their log-probabilities.

        The actions are drawn as `Categorical.sample` draws them. Uniforms are (N,) float64; `allowed` (N, A) bool; rows
        in `greedy` (N,) take the most likely action.
        """
        from marl_ray.policies.actor_critic.compiled.sampling import act

        outputs = self.outputs(rows)
        actions, log_probs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        masks = np.empty((0, outputs.shape[1]), bool) if allowed is None else allowed
        act(outputs, masks, noise, greedy, actions, log_probs)
        return actions, log_probs
