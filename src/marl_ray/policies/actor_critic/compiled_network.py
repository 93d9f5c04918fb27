"""Small networks over vectors, evaluated by compiled code; other networks have none and stay with torch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from marl_ray.policies.actor_critic.networks import Network, VectorLinear

LARGEST = 50_000
"""Most weights of a network for which compiled code is faster than torch, whose products of large matrices are."""


def is_small(network: Network | None) -> bool:
    """True if there is compiled code for the network: a small perceptron of float32 over vectors."""
    return (
        network is not None
        and isinstance(network.first, VectorLinear)
        and sum(parameter.numel() for parameter in network.parameters()) <= LARGEST
        and all(parameter.dtype is torch.float32 for parameter in network.parameters())
    )


def flat_weights(parameters: Sequence[Tensor]) -> np.ndarray:
    """The weights as one row, a copy."""
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in parameters])


class CompiledNetwork:
    """A small network as it is now; later changes of its weights do not reach it."""

    def __init__(self, network: Network):
        """Take over the weights of a network that `is_small`."""
        from marl_ray.policies.actor_critic.mlp_arguments import layout, limit_blas_threads

        assert isinstance(network.first, VectorLinear)
        limit_blas_threads()
        linear = [network.first.linear, *(layer for layer in network.rest if isinstance(layer, nn.Linear))]
        widths = [linear[0].in_features, *(layer.out_features for layer in linear)]
        norm, tanh = isinstance(network.first.norm, nn.LayerNorm), isinstance(network.rest[0], nn.Tanh)
        self.layout = layout(widths, norm, tanh)
        self.weights = flat_weights(list(network.parameters()))

    def outputs(self, rows: np.ndarray) -> np.ndarray:
        """Outputs (N, out) float32 from raw rows (N, D) float32."""
        from marl_ray.policies.actor_critic.mlp_kernels import evaluate

        outputs = np.empty((len(rows), self.layout.widths[-1]), np.float32)
        evaluate(self.weights, self.layout, np.ascontiguousarray(rows), outputs)
        return outputs

    def infer(self, rows: Tensor) -> Tensor:
        """Outputs (N, out) from raw rows (N, D), as `Network.infer` computes them."""
        return torch.from_numpy(self.outputs(rows.float().numpy()))

    def act(
        self, rows: np.ndarray, noise: np.ndarray, allowed: np.ndarray | None, greedy: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions (N,) from 0 and their log-probabilities, of one categorical, as `Categorical.sample` draws them.

        Uniforms are (N,) float64; `allowed` (N, A) bool; rows in `greedy` (N,) take the most likely action.
        """
        from marl_ray.policies.actor_critic.mlp_kernels import act

        outputs = self.outputs(rows)
        actions, log_probs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        masks = np.empty((0, outputs.shape[1]), bool) if allowed is None else allowed
        act(outputs, masks, noise, greedy, actions, log_probs)
        return actions, log_probs
