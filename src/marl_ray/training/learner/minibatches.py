"""Divide a batch into minibatches (a gradient step each) and micro-batches (a forward and backward pass each).

A minibatch is a set of time indices or, where rows are whole episodes, a set of copies. It is the same set for any
number of workers, because the order is drawn over the copies of all workers. A micro-batch is a part of the copies of a
minibatch. For an actor-critic a copy is an environment copy with the rows of its agents; for a token policy it is one
row, a response.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marl_ray.policies.actor_critic.policy import EncodedRows
from marl_ray.rollout.rng import permutation


@dataclass(frozen=True)
class BatchShare:
    """The share of a batch that this worker has; its rows are copies * agents."""

    agents: int
    """Rows of each copy."""
    steps: int
    """T: environment steps, or tokens."""
    rank: int
    """Number of this worker, from 0."""
    bounds: tuple[int, ...]
    """(workers + 1,) the number of each worker's first copy among all copies, then the count of all copies."""
    joint: int = 1
    """Neighbouring workers that compute each pass together."""

    @property
    def first_copy(self) -> int:
        """Number of this worker's first copy among all."""
        return self.bounds[self.rank]

    @property
    def copies(self) -> int:
        """The number of this worker's copies."""
        return self.bounds[self.rank + 1] - self.first_copy

    @property
    def all_copies(self) -> int:
        """The number of all workers' copies."""
        return self.bounds[-1]


@dataclass(frozen=True)
class Selection:
    """Some copies at some time indices; None means all of them."""

    copies: Tensor | None
    times: Tensor | None
    max_copies: int
    """Largest per-worker copy count; it sets the number of passes on all workers."""
    is_stand_in: bool = False
    """The copies only let this worker take part in a pass in which it has none; they count nowhere."""

    def decisions(self, mask: Tensor, agents: int) -> Tensor:
        """Take the selection's part (R, T') of a mask (copies * agents, T)."""
        selected_mask = self.take(mask, agents)
        return torch.zeros_like(selected_mask) if self.is_stand_in else selected_mask

    def take(self, array: Tensor, agents: int) -> Tensor:
        """Take the selection's part (R, T', ...) of a (copies * agents, T, ...) array."""
        if self.copies is not None:
            array = array.unflatten(0, (-1, agents))[self.copies].flatten(0, 1)
        return array if self.times is None else array[:, self.times]

    def rows(self, inputs: EncodedRows, share: BatchShare, agents: int) -> EncodedRows:
        """Return the selection's part of the prepared inputs of (copies * agents * T) rows."""
        if self.copies is None and self.times is None:
            return inputs
        device = inputs.values.device
        number = torch.arange(share.copies * agents * share.steps, device=device)
        return inputs.rows(self.take(number.reshape(-1, share.steps), agents).reshape(-1))


def whole_batch(share: BatchShare) -> Selection:
    """Return the selection of all copies at all times."""
    return Selection(None, None, max(b - a for a, b in zip(share.bounds, share.bounds[1:], strict=False)))


def minibatches(
    seed: int, iteration: int, epoch: int, count: int, share: BatchShare, has_whole_episodes: bool
) -> list[Selection]:
    """Draw the `count` minibatches of an epoch and return this worker's part of each (possibly of no copies)."""
    batch = whole_batch(share)
    if count == 1:  # the order of a sum's terms does not matter, so no row is moved
        return [batch]
    size = share.all_copies if has_whole_episodes else share.steps
    parts = torch.from_numpy(permutation(seed, iteration, epoch, size)).tensor_split(count)
    if not has_whole_episodes:
        return [Selection(None, part, batch.max_copies) for part in parts]
    selections, inner = [], torch.tensor(share.bounds[1:])
    for part in parts:
        holder = torch.bucketize(part, inner, right=True)
        max_copies = int(torch.bincount(holder, minlength=1).max())
        selections.append(Selection(part[holder == share.rank] - share.first_copy, None, max_copies))
    return selections


def micro_batches(
    selection: Selection, share: BatchShare, size: int | None, order: Tensor | None = None
) -> Iterator[tuple[Selection, bool]]:
    """Yield the parts of a minibatch, of at most `size` copies each, with True for the last part.

    Every worker gets equally many parts, of which some may be empty. Of workers that compute a pass together one has
    copies in it. `order` (copies,) puts copies with similar numbers into one part, the largest first.
    """
    if size is None or (size >= selection.max_copies and share.joint == 1):
        yield selection, True
        return
    copies = torch.arange(share.copies) if selection.copies is None else selection.copies
    if order is not None:
        copies = copies[order.cpu()[copies].argsort(descending=True, stable=True)]
    passes = -(-selection.max_copies // size) * share.joint
    for number in range(passes):
        first, worker = number // share.joint * size, number % share.joint
        part = copies[first : first + size] if worker == share.rank % share.joint else copies[:0]
        yield Selection(part, selection.times, size), number + 1 == passes
