"""Compute linear layers with the same input, and their adapters, as one product."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from marl_ray.policies.language.lora import AdaptedLinear


@dataclass(frozen=True)
class Product:
    """The product [x, s x A^T] [W, B]^T + b.

    The adapters are columns of the weight, so that the sum is rounded once.
    """

    weight: Tensor
    """(outputs, inputs + ranks)."""
    bias: Tensor | None
    down: Tensor | None
    """(ranks, inputs); None without adapters."""
    scale: float

    def widen_input(self, x: Tensor) -> Tensor:
        """Return the input that the weight is multiplied with."""
        return x if self.down is None else torch.cat([x, functional.linear(x, self.down) * self.scale], -1)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product (..., outputs) of inputs (..., inputs)."""
        return functional.linear(self.widen_input(x), self.weight, self.bias)


def join_layers(*layers: Any) -> Product:
    """Make one product of linear layers with the same input; it returns their outputs one after another.

    The layers' parameters become views of the product's weight, so that a write to a parameter changes the product.
    They are moved only once.
    """
    inputs = layers[0].weight.shape[1]
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear)]
    downs = [layer.down for layer in adapted]
    pieces, row, column = [], 0, inputs
    for layer in layers:
        pieces.append((layer.weight, (row, 0)))
        if isinstance(layer, AdaptedLinear):
            pieces.append((layer.up, (row, column)))
            column += layer.up.shape[1]
        row += len(layer.weight)
    biases = [layer.bias for layer in layers]
    return Product(
        _place_parameters(pieces, (row, column)),
        None if biases[0] is None else _place_parameters(_stack_rows(biases), (row,)),
        _place_parameters(_stack_rows(downs), (column - inputs, inputs)) if downs else None,
        adapted[0].scale if adapted else 1.0,
    )


Place = tuple[int, ...]


def _stack_rows(parts: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Place]]:
    pieces, row = [], 0
    for part in parts:
        pieces.append((part, (row, *(0,) * (part.ndim - 1))))
        row += len(part)
    return pieces


def _place_parameters(pieces: Sequence[tuple[nn.Parameter, Place]], sizes: tuple[int, ...]) -> Tensor:
    """Return one tensor with the parameters at their places, the first at the beginning, and zeros elsewhere."""
    steps = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    first = pieces[0][0]
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        part.untyped_storage().data_ptr() == storage
        and part.stride() == steps
        and part.storage_offset() == start + sum(at * step for at, step in zip(place, steps, strict=True))
        for part, place in pieces
    ):
        return first.detach().as_strided(sizes, steps, start)
    joined = first.new_zeros(sizes)
    for part, place in pieces:
        view = joined[tuple(slice(at, at + size) for at, size in zip(place, part.shape, strict=True))]
        view.copy_(part.detach())
        part.data = view
    return joined
