"""Action distributions as functions of network outputs, sampled from given uniform noise.

Sampling takes its noise as an argument, so that an action depends on (seed, step, environment copy, agent) alone and not
on which process drew it. `N` is any number of decisions.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_ray.errors import MarlRayError

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
"""Bounds of the log standard deviation, as in CleanRL's SAC: standard deviations from 0.007 to 7.4."""
FORBIDDEN_LOGIT = -1e9
"""Raw output of a forbidden choice: finite, so that entropies and gradients have no NaN; its probability is exactly 0."""


class Distribution(Protocol):
    """The distribution over an action space.

    It has the number of network outputs, and the functions that turn them into actions.
    """

    @property
    def parameters(self) -> int:
        """Number of network outputs per decision."""

    @property
    def noise(self) -> int:
        """Number of uniform numbers that a sampled decision takes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action."""

    @property
    def dtype(self) -> torch.dtype:
        """Number type of an action."""

    def normalize(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Convert raw network outputs (N, parameters) once to the form that the other methods take.

        `allowed` (N, parameters) bool marks the choices that the environment permits; others get probability zero.
        """

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Return the actions (N, *shape) from normalised outputs (N, parameters) and uniforms in [0, 1) (N, noise)."""

    def mode(self, outputs: Tensor) -> Tensor:
        """Return the most likely actions (N, *shape)."""

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability (density for continuous actions) of actions, (N,)."""

    def entropy(self, outputs: Tensor) -> Tensor:
        """Return the entropy in nats, (N,)."""

    def to_env(self, actions: Tensor) -> np.ndarray:
        """Return the actions as the environment's space takes them, (N, *shape)."""


@dataclass(frozen=True)
class Categorical:
    """One categorical per entry; `shape` is () for `Discrete` and (K,) for `MultiDiscrete`."""

    sizes: tuple[int, ...]
    """Number of choices of each entry."""
    shape: tuple[int, ...]
    start: int = 0
    """The environment's number of the first choice."""
    dtype = torch.int64

    @property
    def parameters(self) -> int:
        """The number of logits of all entries."""
        return sum(self.sizes)

    @property
    def noise(self) -> int:
        """One uniform number for each entry."""
        return len(self.sizes)

    def normalize(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the log-probabilities (N, parameters) of each entry's choices, from their logits."""
        if allowed is not None:
            outputs = outputs.masked_fill(~allowed, FORBIDDEN_LOGIT)
        if len(self.sizes) == 1:
            return outputs.log_softmax(-1)
        return torch.cat([part.log_softmax(-1) for part in outputs.split(self.sizes, -1)], -1)

    def _log_probs(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return outputs.split(self.sizes, -1) if len(self.sizes) > 1 else (outputs,)

    def _reshape(self, columns: list[Tensor]) -> Tensor:
        return torch.stack(columns, -1) if self.shape else columns[0]

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Draw each entry by its inverse distribution function, at its uniform number."""
        columns = []
        for k, log_p in enumerate(self._log_probs(outputs)):
            # This is the inverse distribution function in float64. It scales the uniform by the rounded sum of the
            # probabilities, which may differ from 1. A uniform below 1 then stays below the sum, so that a choice of
            # probability zero is never drawn, not even the last one.
            edges = log_p.exp().cumsum(-1).double()
            columns.append((noise[..., k : k + 1].double() * edges[..., -1:] >= edges[..., :-1]).sum(-1))
        return self._reshape(columns)

    def mode(self, outputs: Tensor) -> Tensor:
        """Return the choice of the largest probability of each entry."""
        return self._reshape([log_p.argmax(-1) for log_p in self._log_probs(outputs)])

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the sum of the log-probabilities of the chosen entries, (N,)."""
        columns = actions.unbind(-1) if self.shape else [actions]
        terms = [
            log_p.gather(-1, column.unsqueeze(-1)).squeeze(-1)
            for log_p, column in zip(self._log_probs(outputs), columns, strict=True)
        ]
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def entropy(self, outputs: Tensor) -> Tensor:
        """Return the sum of the entries' entropies in nats, (N,)."""
        terms = [-(log_p.exp() * log_p).sum(-1) for log_p in self._log_probs(outputs)]
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def to_env(self, actions: Tensor) -> np.ndarray:
        """Return the choices, counted from the space's `start`, (N, *shape)."""
        return actions.cpu().numpy() + self.start


@dataclass(frozen=True)
class Gaussian:
    """Independent normals; outputs are the means, then the log standard deviations, clamped to [-5, 2].

    Log-probabilities are those of the action as drawn; it is clipped to the box only on its way to the environment.
    """

    shape: tuple[int, ...]
    low: np.ndarray
    """(*shape) the smallest action that the environment takes."""
    high: np.ndarray
    """(*shape) the largest action that the environment takes."""
    dtype = torch.float32

    @property
    def noise(self) -> int:
        """One uniform number for each number of the action."""
        return math.prod(self.shape)

    @property
    def parameters(self) -> int:
        """The means, and as many log standard deviations."""
        return 2 * self.noise

    def normalize(self, outputs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the means and the bounded log standard deviations, (N, parameters) float32; `allowed` is not read."""
        mean, log_std = outputs.float().chunk(2, -1)
        return torch.cat([mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)], -1)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Return mean + std * Phi^-1(noise), (N, *shape); not clipped to the box."""
        mean, log_std = outputs.chunk(2, -1)
        normal = torch.special.ndtri(noise.double().clamp(1e-12, 1 - 1e-12)).to(mean.dtype)
        actions: Tensor = mean + log_std.exp() * normal
        return actions.reshape(-1, *self.shape)

    def mode(self, outputs: Tensor) -> Tensor:
        """Return the means, (N, *shape); not clipped to the box."""
        return outputs.chunk(2, -1)[0].reshape(-1, *self.shape)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the log of the density of unclipped actions, (N,)."""
        mean, log_std = outputs.chunk(2, -1)
        z = (actions.reshape(mean.shape) - mean) / log_std.exp()
        return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """Return the differential entropy in nats, (N,), of actions that are not clipped."""
        log_std = outputs.chunk(2, -1)[1]
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def to_env(self, actions: Tensor) -> np.ndarray:
        """Return the actions clipped to the box, (N, *shape)."""
        within: np.ndarray = np.clip(actions.cpu().numpy(), self.low, self.high)
        return within


def distribution_of(space: spaces.Space[Any]) -> Distribution:
    """Return the distribution of an action space. Raises MarlRayError if there is none."""
    match space:
        case spaces.Discrete():
            return Categorical((int(space.n),), (), int(space.start))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1 and not np.any(space.start):
            return Categorical(tuple(int(n) for n in space.nvec), space.shape)
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return Gaussian(space.shape, space.low, space.high)
    raise MarlRayError(f"action space {space} is not supported: expected Discrete, MultiDiscrete from 0 or a float Box")
