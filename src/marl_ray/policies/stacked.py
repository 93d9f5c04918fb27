"""One forward pass over several bundles: the weights of policies that are built alike stand side by side.

A pass of a small network costs the calls of its layers, not what these compute. So rows of several bundles go through the
layers of all of them at once, as one batched matrix product a layer, and each row keeps what its own bundle's weights gave.
That multiplies the arithmetic by the number of bundles, which pays for small networks only (`LARGEST`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from marl_ray.policies.bundle import Bundle, ServedPolicy
from marl_ray.policies.distributions import Categorical
from marl_ray.policies.networks import Network, OneHotLinear, VectorLinear

LARGEST = 50_000
"""Weights of a network's matrices, at most; tables of categories are not multiplied."""


class _StackedOneHot:
    """The first layers of networks over categories."""

    def __init__(self, layers: Sequence[OneHotLinear]):
        begins = torch.arange(len(layers)).unsqueeze(1) * len(layers[0].weight)
        self._offsets = layers[0].offsets + begins
        self._table = torch.cat([layer.weight for layer in layers])
        self._biases = torch.stack([layer.bias for layer in layers])

    def __call__(self, rows: Tensor, which: Tensor) -> Tensor:
        index = rows.long() + self._offsets.index_select(0, which)
        return functional.embedding_bag(index, self._table, mode="sum") + self._biases.index_select(0, which)


class _StackedVector:
    """The first layers of networks over vectors."""

    def __init__(self, layers: Sequence[VectorLinear]):
        norms = [layer.norm for layer in layers if isinstance(layer.norm, nn.LayerNorm)]
        self._eps = norms[0].eps if norms else None
        if norms:
            self._scales = torch.stack([norm.weight for norm in norms])
            self._shifts = torch.stack([norm.bias for norm in norms])
        self._linear = _side_by_side([layer.linear for layer in layers])

    def __call__(self, rows: Tensor, which: Tensor) -> Tensor:
        hidden = rows.float()
        if self._eps is not None:
            hidden = functional.layer_norm(hidden, hidden.shape[1:], eps=self._eps)
            hidden = hidden * self._scales.index_select(0, which) + self._shifts.index_select(0, which)
        return _through(self._linear, hidden.expand(len(self._linear[0]), -1, -1))


class StackedNetwork:
    """Networks with the same layers."""

    @torch.no_grad()
    def __init__(self, networks: Sequence[Network]):
        first = [network.first for network in networks]
        categorical = [layer for layer in first if isinstance(layer, OneHotLinear)]
        vectors = [layer for layer in first if isinstance(layer, VectorLinear)]
        self._first = _StackedOneHot(categorical) if categorical else _StackedVector(vectors)
        self._count = len(networks)
        self._rest: list[tuple[Tensor, Tensor] | nn.Module] = []
        for layers in zip(*(network.rest for network in networks), strict=True):
            linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
            self._rest.append(_side_by_side(linear) if linear else layers[0])

    @torch.no_grad()
    def infer(self, rows: Tensor, which: Tensor) -> Tensor:
        """Outputs (N, out) from raw rows (N, D), each by the network `which` (N,) int64."""
        hidden = self._first(rows, which).expand(self._count, -1, -1)
        for layer in self._rest:
            hidden = _through(layer, hidden) if isinstance(layer, tuple) else layer(hidden)
        return hidden[which, torch.arange(len(which))].float()


def _side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Weights (A, in, out) and biases (A, 1, out)."""
    weights = torch.stack([layer.weight.T for layer in layers]).contiguous()
    return weights, torch.stack([layer.bias for layer in layers]).unsqueeze(1)


def _through(layer: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
    weights, biases = layer
    return torch.baddbmm(biases, hidden, weights)


class Stack:
    """Bundles that act in one pass."""

    def __init__(self, bundles: Sequence[Bundle]):
        """ValueError unless they are `stackable`."""
        if not stackable(bundles):
            raise ValueError("expected bundles whose policies are built alike")
        self._bundle = bundles[0]
        self._networks = {
            name: StackedNetwork([bundle.policies[name].actor for bundle in bundles]) for name in bundles[0].policies
        }

    def act(
        self,
        requests: Sequence[Mapping[str, np.ndarray]],
        which: Sequence[int],
        noise: np.random.Generator | None = None,
        masks: Sequence[Mapping[str, np.ndarray]] = (),
    ) -> list[dict[str, tuple[np.ndarray, float]]]:
        """As `Bundle.act`; each request by the bundle `which` of them."""

        def infer(policy: str, asked: list[int], rows: Tensor) -> Tensor:
            return self._networks[policy].infer(rows, torch.tensor([which[i] for i in asked]))

        return self._bundle.act(requests, noise, masks, infer)


def stackable(bundles: Sequence[Bundle]) -> bool:
    """Whether the bundles have the same policies for the same agents, small ones whose layers can stand side by side."""
    first = bundles[0]
    if any(one.agents != first.agents or one.policies.keys() != first.policies.keys() for one in bundles):
        return False
    return all(_alike([one.policies[name] for one in bundles]) for name in first.policies)


def _alike(policies: Sequence[ServedPolicy]) -> bool:
    first = policies[0]
    states = [policy.actor.state_dict() for policy in policies]
    shapes = [{name: (value.shape, value.dtype) for name, value in state.items()} for state in states]
    layers = [[type(layer) for layer in policy.actor.modules()] for policy in policies]
    return (
        isinstance(first.actor.first, OneHotLinear | VectorLinear)
        and isinstance(first.distribution, Categorical)
        and sum(layer.weight.numel() for layer in first.actor.modules() if isinstance(layer, nn.Linear)) <= LARGEST
        and all(found == shapes[0] for found in shapes)
        and all(found == layers[0] for found in layers)
        and all(policy.distribution == first.distribution for policy in policies)
        and all(policy.observation_space == first.observation_space for policy in policies)
    )
