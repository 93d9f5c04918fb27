"""Sums and broadcasts over the training workers, and their mesh of devices."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from marl_ray.policies.agreement import run_on_all_workers

Value = TypeVar("Value")

MAX_GATHERED = 1 << 14
"""Maximum number of elements that `sum_over_workers` gathers and adds itself. For so few this takes half the time of gloo's
reduction, which needs two rounds of messages."""


def rank_and_world_size() -> tuple[int, int]:
    """Return (this worker's rank, number of workers)."""
    return dist.get_rank(), dist.get_world_size()


def worker_mesh(kind: str, replicate: int = 1, context: int = 1, tensor: int = 1) -> DeviceMesh:
    """Return all workers as one mesh of devices of a kind.

    The mesh's dimension `shard` spreads weights (FSDP2). With `replicate` above 1 there is one more before it, of
    groups that each hold all weights (HSDP). Where workers compute passes together, the last two are `context`, workers
    with a part of every sequence each, and `tensor`, those with a part of every layer.
    """
    workers = dist.get_world_size()
    if context * tensor > 1:
        shape = (replicate, workers // (replicate * context * tensor), context, tensor)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard", "context", "tensor"))
    if replicate == 1:
        return init_device_mesh(kind, (workers,))
    return init_device_mesh(kind, (replicate, workers // replicate), mesh_dim_names=("replicate", "shard"))


def count_holders(tensor: Tensor) -> int:
    """Return the number of workers that hold the same part of a tensor; 1 for a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return 1
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return dist.get_world_size() // math.prod(size for size, placement in pairs if not placement.is_replicate())


def sum_over_workers(tensor: Tensor) -> Tensor:
    """Sum a tensor of any device over all workers.

    The result is on the tensor's device, and bit for bit the same on each worker.
    """
    workers, device = dist.get_world_size(), tensor.device
    if workers == 1:
        return tensor
    moved = tensor.to(_exchange_device(device))
    if tensor.numel() > MAX_GATHERED:
        dist.all_reduce(moved)
        return moved.to(device)
    parts = moved.new_empty(workers * tensor.numel())
    dist.all_gather_single(parts, moved.reshape(-1).contiguous())
    return parts.to(device).reshape(workers, *tensor.shape).sum(0)


def _exchange_device(device: torch.device) -> torch.device:
    """Return the device itself if the process group exchanges its tensors, or else one that it does.

    NCCL knows no CPU, for example.
    """
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def sum_each_over_workers(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum several tensors over all workers in one exchange, in float64."""
    flat = sum_over_workers(torch.cat([part.detach().double().reshape(-1) for part in parts.values()]))
    pieces = flat.split([part.numel() for part in parts.values()])
    return {name: piece.reshape(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def broadcast_from_rank0(make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0 alone, and return its plain value on every worker.

    Raises its error on all workers, as `run_on_all_workers` does.
    """
    made = run_on_all_workers(lambda: make() if dist.get_rank() == 0 else None)
    values = [made]
    dist.broadcast_object_list(values, src=0)
    return cast(Value, values[0])
