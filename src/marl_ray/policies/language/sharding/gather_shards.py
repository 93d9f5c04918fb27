"""The parts of sharded tensors: which one a worker holds, and gathering many in one exchange.

With small models an exchange takes its latency, whatever its size.

A tensor of the mesh's dimension `tensor` is divided along one of its dimensions, and each of these parts is split along its
first dimension over one other dimension of the mesh, as FSDP2 does it. Over the rest of the mesh it is replicated.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from marl_ray.policies.agreement import all_gather_values

MAX_GATHERED_BYTES = 1 << 26
"""Maximum number of bytes that are gathered in one exchange, unless a single tensor has more."""
ALIGNMENT_BYTES = 8
"""Every tensor's part begins at a multiple of this many bytes, so that it can be read as numbers."""


def full_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each complete tensor in turn, on the device of its mesh; every worker takes part.

    Raises, before more is gathered, the error of a worker that has failed in a block of `run_on_all_workers` instead of
    taking part.
    """
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > MAX_GATHERED_BYTES:
            yield from _gather_tensors(batch)
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    yield from _gather_tensors(batch)


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the indices of the part that this worker holds, in each dimension of the tensor."""
    return _part_of(tensor, dist.get_rank())


def _part_of(tensor: DTensor, rank: int) -> tuple[slice, ...]:
    """Return the indices of the part that a worker of the tensor's mesh holds."""
    mesh, part = tensor.device_mesh, [slice(0, length) for length in tensor.shape]
    place = (mesh.mesh == rank).nonzero()[0].tolist()
    for over, dimension in filter(None, (_division(tensor), _split(tensor))):
        held, workers, number = part[dimension], mesh.size(over), place[over]
        step = math.ceil((held.stop - held.start) / workers)  # that of torch.chunk
        part[dimension] = slice(*(min(held.start + n * step, held.stop) for n in (number, number + 1)))
    return tuple(part)


def gather_to_rank0(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """Return the complete tensor on rank 0, and None on the others, which send their parts there.

    The parts go over a group of all workers on CPU. Every worker takes part, with a tensor on CPU. Raises the error of
    a worker that has failed in a block of `run_on_all_workers`.
    """
    rank = dist.get_rank()
    if not isinstance(tensor, DTensor):
        all_gather_values(None, group)
        return tensor if rank == 0 else None
    holders: dict[tuple[tuple[int, int], ...], int] = {}
    ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())
    if 0 in ranks:  # of workers that hold the same parts, these send them
        for each in ranks:
            holders.setdefault(tuple((part.start, part.stop) for part in _part_of(tensor, each)), each)
    # What needs memory comes before the exchange: once it is over, all workers send and take their parts.
    local = tensor.to_local().contiguous()
    complete = torch.empty(tensor.shape, dtype=tensor.dtype) if rank == 0 else None
    sizes = [math.prod(end - begin for begin, end in bounds) for bounds, holder in holders.items() if holder]
    room = torch.empty(max(sizes, default=0) if rank == 0 else 0, dtype=tensor.dtype)
    all_gather_values(None, group)
    if complete is None:
        if rank in holders.values() and local.numel():
            dist.send(local, 0, group=group)
        return None
    for bounds, holder in holders.items():
        target = complete[tuple(slice(*bound) for bound in bounds)]
        if holder == 0:
            target.copy_(local)
        elif target.numel():
            part = room[: target.numel()].view(target.shape)
            dist.recv(part, holder, group=group)
            target.copy_(part)
    return complete


def _division(tensor: DTensor) -> tuple[int, int] | None:
    """Return (dimension of the mesh, dimension of the tensor) along which a tensor is divided; None if it is not.

    The division is among workers that compute together.
    """
    names, last = tensor.device_mesh.mesh_dim_names or (), tensor.placements[-1]
    return (len(names) - 1, last.dim) if "tensor" in names and isinstance(last, Shard) else None


def _split(tensor: DTensor) -> tuple[int, int]:
    """Return (dimension of the mesh, dimension of the tensor) along which FSDP2 splits a tensor.

    The split is over the last dimension of the mesh but `tensor`. The dimension `tensor` is last also for tensors that
    all its workers hold alike, such as the bias of a layer that is divided by its inputs.
    """
    return tensor.device_mesh.ndim - (2 if "tensor" in (tensor.device_mesh.mesh_dim_names or ()) else 1), 0


def _gather_tensors(tensors: list[Tensor]) -> list[Tensor]:
    gathered = [
        tensor.to_local().to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor
        for tensor in tensors
    ]
    for stage in (_split, _division):
        jobs_of: dict[dist.ProcessGroup, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, DTensor) and (places := stage(tensor)) is not None:
                over, dimension = places
                length, division = tensor.shape[dimension], _division(tensor)
                if stage is _split and division is not None and division[1] == dimension:
                    length //= tensor.device_mesh.size(division[0])
                jobs_of.setdefault(tensor.device_mesh.get_group(over), []).append((number, dimension, length))
        for group, jobs in jobs_of.items():
            parts = [gathered[number].movedim(dimension, 0) for number, dimension, _ in jobs]
            joined = _join_parts(parts, [length for *_, length in jobs], group)
            for (number, dimension, _), tensor in zip(jobs, joined, strict=True):
                gathered[number] = tensor.movedim(0, dimension)
    return gathered


def _join_parts(own_parts: list[Tensor], lengths: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Join the workers' parts of several tensors along the first dimension, in which these have `lengths`."""
    workers = dist.get_world_size(group)
    if workers == 1:
        return own_parts
    # The parts are those of torch.chunk. They have equal lengths, except for the last ones, which are filled up.
    used = [
        math.ceil(length / workers) * math.prod(part.shape[1:]) * part.itemsize
        for length, part in zip(lengths, own_parts, strict=True)
    ]
    sizes = [math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in used]
    flat = [part.reshape(-1).view(torch.uint8) for part in own_parts]
    own_bytes = torch.cat([functional.pad(part, (0, size - len(part))) for part, size in zip(flat, sizes, strict=True)])
    every = own_bytes.new_empty(workers * len(own_bytes))
    # A worker that has no room for so much says so here. After the exchange all workers gather.
    all_gather_values(None)
    dist.all_gather_single(every, own_bytes, group=group)
    joined = []
    for part, pieces, size, length in zip(
        own_parts, every.view(workers, -1).split(sizes, 1), used, lengths, strict=True
    ):
        shape = (length, *part.shape[1:])
        joined.append(pieces[:, :size].reshape(-1).view(part.dtype)[: math.prod(shape)].view(shape))
    return joined
