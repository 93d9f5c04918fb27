"""The networks of an actor-critic: a first layer that fits the observation space, then a small MLP."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from marl_ray.config import NetworkConfig
from marl_ray.policies.actor_critic.spaces import CATEGORICAL_SPACES, cardinalities, row_size

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class OneHotLinear(nn.Module):
    """A linear layer over concatenated one-hot codes, never built in full.

    The layer computes the same sum of weight rows in two ways, each the fastest where it is used (times per row of 148
    entries, one thread). Without gradients it is an embedding bag (0.6 us). With gradients it is a matrix product over
    the columns that occur in the batch, which are encoded once and reused by every epoch (0.4 us forward, 0.7 us
    backward); the backward pass of torch's embedding bag would take 20 us.
    """

    offsets: Tensor

    def __init__(self, sizes: list[int], out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(sizes), out))
        self.bias = nn.Parameter(torch.zeros(out))
        self.register_buffer("offsets", torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()]), persistent=False)

    def prepare(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Turn categories (N, K) into (values (N, C), columns (C,)): the one-hot code without its all-zero columns."""
        index = rows.long() + self.offsets
        used = torch.bincount(index.reshape(-1), minlength=len(self.weight)).nonzero().reshape(-1)
        position = torch.empty(len(self.weight), dtype=torch.long, device=rows.device)
        position[used] = torch.arange(len(used), device=rows.device)
        values = torch.zeros(len(rows), len(used), device=rows.device)
        return values.scatter_(1, position[index], 1.0), used

    def forward(self, values: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return the outputs (N, out) of what `prepare` returned, or without `columns` of categories (N, K)."""
        if columns is None:
            return functional.embedding_bag(values.long() + self.offsets, self.weight, mode="sum") + self.bias
        return torch.addmm(self.bias, values.to(self.weight.dtype), self.weight[columns])


class VectorLinear(nn.Module):
    """Layer norm over raw vector observations, unless it is turned off, then a linear layer (as in MAPPO)."""

    def __init__(self, size: int, out: int, normalize: bool):
        super().__init__()
        self.norm = nn.LayerNorm(size) if normalize else nn.Identity()
        self.linear = nn.Linear(size, out)

    def prepare(self, rows: Tensor) -> tuple[Tensor, None]:
        """Return the observations (N, D) as float32, and None in the place of columns."""
        return rows.float(), None

    def forward(self, values: Tensor, columns: None = None) -> Tensor:
        """Return the outputs (N, out) for observations (N, D)."""
        outputs: Tensor = self.linear(self.norm(values.to(self.linear.weight.dtype)))
        return outputs


class ImageLinear(nn.Module):
    """Two convolutions over an (H, W, C) image, then a linear layer. Pixels of integer images are divided by 255."""

    def __init__(self, shape: tuple[int, int, int], out: int, scale: float):
        super().__init__()
        height, width, channels = shape
        self.shape, self.scale = shape, scale
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.linear = nn.Linear(32 * math.ceil(height / 4) * math.ceil(width / 4), out)

    def prepare(self, rows: Tensor) -> tuple[Tensor, None]:
        """Return the pixels (N, H * W * C) as float32, of integers divided by 255, and None in the place of columns."""
        return rows.float() * self.scale, None

    def forward(self, values: Tensor, columns: None = None) -> Tensor:
        """Return the outputs (N, out) for pixels (N, H * W * C)."""
        images = values.to(self.linear.weight.dtype).reshape(-1, *self.shape).permute(0, 3, 1, 2)
        outputs: Tensor = self.linear(self.convolutions(images).flatten(1))
        return outputs


def first_layer(
    space: spaces.Space[Any], out: int, normalize: bool = True
) -> OneHotLinear | VectorLinear | ImageLinear:
    """Return the first layer for rows of this space (see `spaces.to_row`)."""
    if isinstance(space, CATEGORICAL_SPACES):
        return OneHotLinear(cardinalities(space), out)
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        return ImageLinear(space.shape, out, 1 / 255 if space.dtype == np.uint8 else 1.0)
    return VectorLinear(row_size(space), out, normalize)


class Network(nn.Module):
    """A first layer, hidden layers and an output layer.

    Weights begin orthogonal; the last layer has its own gain.
    """

    def __init__(self, space: spaces.Space[Any], config: NetworkConfig, out: int, gain: float):
        super().__init__()
        widths = config.hidden
        self.first = first_layer(space, widths[0], config.normalize)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [ACTIVATIONS[config.activation](), nn.Linear(before, after)]
        layers += [ACTIVATIONS[config.activation](), nn.Linear(widths[-1], out)]
        self.rest = nn.Sequential(*layers)
        self.categorical = isinstance(self.first, OneHotLinear)
        self._initialise(nn.init.calculate_gain(config.activation), gain)

    @torch.no_grad()
    def _initialise(self, hidden_gain: float, last_gain: float) -> None:
        weights = [p for name, p in self.named_parameters() if name.endswith("weight") and p.ndim > 1]
        for weight in weights:
            nn.init.orthogonal_(weight, last_gain if weight is weights[-1] else hidden_gain)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def prepare(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Convert rows (N, D) to the input that `forward` takes for gradients.

        The conversion uses no weights, so it is done once per batch.
        """
        return self.first.prepare(rows)

    def forward(self, values: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return the outputs (N, out) in float32 from prepared values.

        Without gradients they may also be computed from raw categorical rows.
        """
        outputs: Tensor = self.rest(self.first(values, columns))
        return outputs.float()

    def infer(self, rows: Tensor) -> Tensor:
        """Return the outputs (N, out) from raw rows, without gradients."""
        with torch.no_grad():
            outputs: Tensor = self(rows if self.categorical else self.prepare(rows)[0])
        return outputs
