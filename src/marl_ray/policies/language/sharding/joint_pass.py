"""Passes that neighbouring workers compute together.

Each worker has a part of every layer, of every sequence, or of both. Each worker brings its own responses, and gets the
outputs of these back. So whatever calls a pass knows nothing of it. Sums over workers are right if a worker's loss is
of its own responses, and FSDP2 takes means over the workers that hold a weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class JointRows(NamedTuple):
    """The responses of all workers of a joint pass, and which are this worker's."""

    prompts: Tensor
    """(A, P)."""
    responses: Tensor
    """(A, T)."""
    mask: Tensor
    """(A, T)."""
    first: int = 0
    """The first row that is this worker's."""
    with_decisions: Sequence[int] | Tensor = ()
    """(K,) for the K rows from there on, their numbers among the rows that the worker gave. Rows without decisions stay
    with it."""

    def of_worker(self, outputs: Sequence[Any], rows: Tensor) -> tuple[list[object], Tensor, Tensor]:
        """Take what is this worker's of outputs (N, ...) for decisions of `rows` (N,).

        Returns these, their rows among those that the worker gave, and their numbers (n,) in N.
        """
        numbers = ((rows >= self.first) & (rows < self.first + len(self.with_decisions))).nonzero()[:, 0]
        assert isinstance(self.with_decisions, Tensor)
        parts = [None if output is None else output[numbers] for output in outputs]
        return parts, self.with_decisions[rows[numbers] - self.first], numbers


@dataclass(frozen=True)
class JointWorkers:
    """The workers that compute each pass together, in the order of their ranks.

    These workers are the last two dimensions of the mesh.
    """

    context: DeviceMesh
    """Workers that have a part of every sequence each."""
    tensor: DeviceMesh
    """Workers that have a part of every layer each."""
    group: dist.ProcessGroup
    """All of them."""

    @property
    def count(self) -> int:
        """The number of these workers."""
        return self.context.size() * self.tensor.size()

    @property
    def number(self) -> int:
        """The number of this worker among them."""
        return self.context.get_local_rank() * self.tensor.size() + self.tensor.get_local_rank()

    def rows_of_all(self, prompts: Tensor, responses: Tensor, mask: Tensor) -> JointRows:
        """Exchange rows with decisions. `prompts` (R, P) on the right with -1 before them; `responses`, `mask` (R, T)."""
        with_decisions = mask.any(1).nonzero()[:, 0]
        sizes = self._every(torch.tensor([[len(with_decisions), prompts.shape[1], mask.shape[1]]], device=mask.device))
        counts = sizes[:, 0].tolist()
        max_rows, width, steps = sizes.amax(0).tolist()
        own_rows = prompts.new_zeros(max_rows, width + 2 * steps)
        own_rows[:, :width] = -1
        own_rows[: len(with_decisions), width - prompts.shape[1] : width] = prompts[with_decisions]
        own_rows[: len(with_decisions), width : width + mask.shape[1]] = responses[with_decisions]
        own_rows[: len(with_decisions), width + steps : width + steps + mask.shape[1]] = mask[with_decisions]
        parts = self._every(own_rows).split(max_rows) if max_rows else ()
        every = torch.cat([own_rows[:0], *(part[:count] for part, count in zip(parts, counts, strict=False))])
        all_prompts, answers, decided = every.split([width, steps, steps], 1)
        return JointRows(all_prompts, answers, decided.bool(), sum(counts[: self.number]), with_decisions)

    def _every(self, rows: Tensor) -> Tensor:
        """Return the rows of all workers, which have equally many, in the order of their ranks."""
        every = rows.new_empty(self.count * len(rows), *rows.shape[1:])
        dist.all_gather_single(every, rows.contiguous(), group=self.group)
        return every

    def choose_decisions(self, places: Tensor, length: int, parted: bool) -> tuple[Tensor, Tensor]:
        """Choose the decisions that this worker scores.

        Returns their numbers among `places` (N,), and the place in its states where each is predicted. Sequences have
        `length` states, of which each worker has a part if they are `parted`.
        """
        if not parted:
            numbers = torch.arange(len(places), device=places.device)[self.number :: self.count]
            return numbers, places[numbers]
        length //= self.context.size()
        first = self.context.get_local_rank() * length
        numbers = ((places >= first) & (places < first + length)).nonzero()[:, 0]
        numbers = numbers[self.tensor.get_local_rank() :: self.tensor.size()]
        return numbers, places[numbers] - first

    def replicate_states(self, states: Tensor) -> Tensor:
        """Return the states that all workers of `tensor` have, of which each scores some.

        The gradient of the states is the mean of these workers' gradients, because FSDP2's mean of a layer's gradient
        is over other workers.
        """
        return _SharedStates.apply(states, self.tensor) if self.tensor.size() > 1 else states  # type: ignore[no-untyped-call]  # torch's

    def join_outputs(self, scored: Sequence[Tensor | None], numbers: Tensor, count: int) -> list[Tensor | None]:
        """Put together outputs (n, ...) of the decisions that each worker has chosen: (count, ...) each, with gradients."""
        widths = [0 if part is None else math.prod(part.shape[1:]) for part in scored]
        flat = torch.cat(
            [part.flatten(1) if part.ndim > 1 else part[:, None] for part in scored if part is not None], 1
        )
        every = flat.new_zeros(count, flat.shape[1]).index_put((numbers,), flat)
        pieces = _WorkerSum.apply(every, self.group).split(widths, 1)  # type: ignore[no-untyped-call]  # torch's
        return [
            None if part is None else piece.reshape(count, *part.shape[1:])
            for part, piece in zip(scored, pieces, strict=True)
        ]


class Heads(NamedTuple):
    """The exchange that gives workers all tokens of some heads, for attention alone.

    Each of these workers has a part of every sequence (DeepSpeed-Ulysses, arXiv 2309.14509).
    """

    workers: DeviceMesh

    def of_all_tokens(self, part: Tensor) -> Tensor:
        """Exchange (1, heads, S / C, width) of this worker's tokens for (1, heads / C, S, width).

        Heads that the workers do not divide are repeated, as grouped queries read them.
        """
        count = self.workers.size()
        heads = part[0].repeat_interleave(count // math.gcd(count, part.shape[1]), 0)
        sent = heads.unflatten(0, (count, -1))
        return self._exchange(sent).transpose(0, 1).flatten(1, 2)[None]

    def of_own_tokens(self, part: Tensor) -> Tensor:
        """Exchange (1, S, heads / C, width) for (1, S / C, heads, width) of this worker's tokens."""
        sent = part[0].unflatten(0, (self.workers.size(), -1))
        return self._exchange(sent).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, sent: Tensor) -> Tensor:
        received: Tensor = _AllToAll.apply(sent, self.workers.get_group())  # type: ignore[no-untyped-call]  # torch's
        return received


class _WorkerSum(torch.autograd.Function):
    """The sum over the workers; the gradient of each part is the sum of all workers' gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Add up the parts of all workers, which have one shape."""
        ctx.group = group
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients of all workers."""
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SharedStates(torch.autograd.Function):
    """States that all workers have; their gradient is the mean of all workers' gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, workers: DeviceMesh) -> Tensor:
        """Return the states themselves."""
        ctx.workers = workers
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Average the gradients of all workers."""
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.workers.get_group())
        return summed / ctx.workers.size(), None


class _AllToAll(torch.autograd.Function):
    """An exchange in which part k of the first dimension goes to worker k, and comes from it."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Exchange parts with all workers."""
        ctx.group = group
        received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Exchange the parts' gradients back."""
        returned = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, gradients[0].contiguous(), group=ctx.group)
        return returned, None
