"""How a batch is cut: minibatches (a gradient step each) and micro-batches (a forward and backward pass each).

A minibatch is a set of time indices, or of environment copies where rows are whole episodes: the same set for any number of
workers, because the order is drawn over all of them. Micro-batches are runs of copies within a minibatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marl_ray.policies.actor_critic import Prepared
from marl_ray.rollout.random import permutation


@dataclass(frozen=True)
class Shape:
    """Of this worker's part of a batch: rows are copies * agents."""

    copies: int
    agents: int
    steps: int
    first_copy: int
    """Number of this worker's first copy among all."""
    all_copies: int


@dataclass(frozen=True)
class Cut:
    """Some copies at some time indices; None means all of them."""

    copies: Tensor | None
    times: Tensor | None

    def of(self, array: Tensor, agents: int) -> Tensor:
        """The part of a (copies * agents, T, ...) array, (R, T', ...)."""
        if self.copies is not None:
            array = array.unflatten(0, (-1, agents))[self.copies].flatten(0, 1)
        return array if self.times is None else array[:, self.times]

    def rows(self, inputs: Prepared, shape: Shape, agents: int) -> Prepared:
        """The same part of the prepared inputs of (copies * agents * T) rows."""
        if self.copies is None and self.times is None:
            return inputs
        device = inputs.values.device
        number = torch.arange(shape.copies * agents * shape.steps, device=device)
        return inputs.rows(self.of(number.reshape(-1, shape.steps), agents).reshape(-1))


def minibatches(seed: int, iteration: int, epoch: int, count: int, shape: Shape, by_copy: bool) -> list[Cut]:
    """The `count` minibatches of an epoch, this worker's part of each (possibly of no copies)."""
    if count == 1:  # the order of a sum's terms does not matter, so nothing need be moved
        return [Cut(None, None)]
    size = shape.all_copies if by_copy else shape.steps
    parts = torch.from_numpy(permutation(seed, iteration, epoch, size)).tensor_split(count)
    if not by_copy:
        return [Cut(None, part) for part in parts]
    last = shape.first_copy + shape.copies
    own = [part[(part >= shape.first_copy) & (part < last)] - shape.first_copy for part in parts]
    return [Cut(part, None) for part in own]


def micro_batches(cut: Cut, shape: Shape, size: int | None) -> Iterator[tuple[Cut, bool]]:
    """Parts of a minibatch of at most `size` copies, and whether each is the last."""
    held = shape.copies if cut.copies is None else len(cut.copies)
    if size is None or size >= held:
        yield cut, True
        return
    copies = torch.arange(shape.copies) if cut.copies is None else cut.copies
    parts = copies.split(size)
    for number, part in enumerate(parts, 1):
        yield Cut(part, cut.times), number == len(parts)
