"""The weights and Adam's moments of a sharded policy as plain rows, on every worker, and their way back."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from marl_ray.training.collectives import rank_and_world_size, sum_over_workers
from marl_ray.training.learner.optimizers import local_part
from marl_ray.training.learner.trained_policy import TrainedPolicy


class FlatState:
    """Rows (weights,) in the order of the model's parameters: the actor's, then the critic's."""

    weights: np.ndarray
    first_moments: np.ndarray
    """Running means of the gradient."""
    second_moments: np.ndarray
    """Running means of its square."""
    rates: np.ndarray
    """The learning rate of each weight."""
    decays: np.ndarray
    """The weight decay of each weight."""
    step: int
    """Steps that Adam has taken."""

    def __init__(self, policy: TrainedPolicy):
        """Copy the state; every worker takes part."""
        self._policy = policy
        self._parameters = list(policy.model.parameters())
        rates = []
        decays = []
        places = []
        offset = 0
        groups = {id(member): group for group in policy.optimizer.param_groups for member in group["params"]}
        for parameter in self._parameters:
            group, size = groups[id(parameter)], parameter.numel()
            rates.append(np.full(size, group["lr"], np.float32))
            decays.append(np.full(size, group["weight_decay"], np.float32))
            places.append(_shard_slice(parameter, offset))
            offset += size
        self.rates, self.decays, self._places = np.concatenate(rates), np.concatenate(decays), places
        rows = torch.zeros(3, offset)
        self.step = 0
        for place, parameter, state in self._shards():
            rows[0, place] = local_part(parameter.detach()).reshape(-1)
            rows[1, place], rows[2, place] = (local_part(state[key]).reshape(-1) for key in ("exp_avg", "exp_avg_sq"))
            self.step = int(state["step"])
        self.weights, self.first_moments, self.second_moments = (row.numpy().copy() for row in sum_over_workers(rows))

    def worker_parts(self, row: np.ndarray) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yield each parameter, and this worker's part of its place in `row`."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            yield parameter, row[place]

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the policy and its optimiser this worker's parts."""
        for place, parameter, state in self._shards():
            for target, row in (
                (parameter, self.weights),
                (state["exp_avg"], self.first_moments),
                (state["exp_avg_sq"], self.second_moments),
            ):
                shard = local_part(target)
                shard.copy_(torch.from_numpy(row[place]).reshape(shard.shape))
            state["step"].fill_(self.step)

    def _shards(self) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """Yield this worker's place in a row, the parameter, and its state, which is made as Adam makes it."""
        for place, parameter in zip(self._places, self._parameters, strict=True):
            state = self._policy.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            yield place, parameter, state


def _shard_slice(parameter: Tensor, offset: int) -> slice:
    """Return the places of this worker's shard of a parameter whose first weight has the place `offset`.

    The shard is some of the parameter's rows.
    """
    if not isinstance(parameter, DTensor):
        return slice(offset, offset + parameter.numel())
    rank, workers = rank_and_world_size()
    # From the shape alone: a row of a sharded parameter would be gathered from all workers.
    rows, width = parameter.shape[0], math.prod(parameter.shape[1:])
    chunk = -(-rows // workers)
    first, last = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    return slice(offset + first * width, offset + last * width)
