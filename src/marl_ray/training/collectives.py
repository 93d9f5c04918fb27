"""Sums and gathers over the training workers."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, workers)."""
    return dist.get_rank(), dist.get_world_size()


def total(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all workers, in place."""
    dist.all_reduce(tensor)
    return tensor


def gather(value: Any) -> list[Any]:
    """Every worker's plain value, by rank, on every worker."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
