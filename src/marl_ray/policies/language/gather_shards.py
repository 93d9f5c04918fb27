"""Gather sharded tensors, many in one exchange. With small models an exchange takes its latency, whatever its size."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

AT_ONCE = 1 << 26
"""Most bytes that are gathered in one exchange, unless a single tensor has more."""
ALIGNED = 8
"""Every tensor's part begins at a multiple of so many bytes, so that it can be read as numbers."""


def unsharded(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each complete tensor in turn, on the device of its mesh; every worker takes part.

    Sharded tensors are split along their first dimension over the last dimension of their mesh, as FSDP2 does it, and
    replicated over others.
    """
    together: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if together and size + tensor.nbytes > AT_ONCE:
            yield from _gathered(together)
            together, size = [], 0
        together.append(tensor)
        size += tensor.nbytes
    yield from _gathered(together)


def _gathered(tensors: list[Tensor]) -> Iterator[Tensor]:
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    exchanged = _exchanged(sharded) if sharded else iter(())
    for tensor in tensors:
        yield next(exchanged) if isinstance(tensor, DTensor) else tensor


def _exchanged(tensors: list[DTensor]) -> Iterator[Tensor]:
    mesh = tensors[0].device_mesh
    workers = mesh.size(-1)
    if workers == 1:  # its shards are the complete tensors
        yield from (tensor.to_local().to(mesh.device_type) for tensor in tensors)
        return
    # The parts are those of torch.chunk. They have equal lengths, except for the last ones, which are filled up.
    used = [math.ceil(tensor.shape[0] / workers) * math.prod(tensor.shape[1:]) * tensor.itemsize for tensor in tensors]
    sizes = [math.ceil(size / ALIGNED) * ALIGNED for size in used]
    own = [tensor.to_local().to(mesh.device_type).reshape(-1).view(torch.uint8) for tensor in tensors]
    own_bytes = torch.cat([functional.pad(part, (0, size - len(part))) for part, size in zip(own, sizes, strict=True)])
    every = own_bytes.new_empty(workers * len(own_bytes))
    dist.all_gather_single(every, own_bytes, group=mesh.get_group(mesh.ndim - 1))
    parts = every.view(workers, -1).split(sizes, 1)
    for tensor, part, size in zip(tensors, parts, used, strict=True):
        flat = part[:, :size].reshape(-1).view(tensor.dtype)
        yield flat[: tensor.numel()].view(tensor.shape)
