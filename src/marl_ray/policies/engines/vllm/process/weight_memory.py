"""Weights in memory that processes share.

One process writes, and any number of readers read between its writes.
"""

import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marl_ray.errors import MarlRayError

ALIGNMENT_BYTES = 64
"""Every tensor begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in the shared memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightLayout:
    """Plain data by which a reader finds the tensors."""

    path: str
    size: int
    entries: tuple[TensorPlace, ...]


class SharedWeights:
    """The writer's side of weights in shared memory.

    The memory has no name in any folder, so that nothing remains however a process ends. The memory begins with two
    numbers: the version whose writing has begun, and the version that is complete.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserve memory for these tensors without writing them."""
        entries, offset = [], ALIGNMENT_BYTES
        for name, tensor in tensors.items():
            entries.append(TensorPlace(name, tensor.dtype, tuple(tensor.shape), offset))
            offset += math.ceil(tensor.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._descriptor = os.memfd_create("marl-ray-weights")
        os.ftruncate(self._descriptor, offset)
        self.layout = WeightLayout(f"/proc/{os.getpid()}/fd/{self._descriptor}", offset, tuple(entries))
        self._memory = _map_file(self.layout)
        weakref.finalize(self, os.close, self._descriptor)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of the same names, shapes and types, from any device.

        Raises MarlRayError if one is missing or differs; then the memory stays as it is.
        """
        for entry in self.layout.entries:
            _check(entry, tensors.get(entry.name))
        self.fill(version, tensors.items())

    def fill(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the same tensors as they arrive, one after another.

        Raises MarlRayError if one is missing or differs; then the memory holds no complete version.
        """
        header = self._memory[:16].view(torch.int64)
        header[0] = version
        missing = {entry.name: entry for entry in self.layout.entries}
        for name, tensor in tensors:
            entry = missing.pop(name, None)
            if entry is not None:
                _check(entry, tensor)
                _view(self._memory, entry).copy_(tensor.detach())
        for entry in missing.values():
            _check(entry, None)
        header[1] = version


def _check(entry: TensorPlace, tensor: Tensor | None) -> None:
    if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
        arrived = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise MarlRayError(f"weights: expected {entry.name} {entry.dtype} {list(entry.shape)}, got {arrived}")


def read_tensors(layout: WeightLayout, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the shared memory itself; a reader must copy what it keeps.

    Raises MarlRayError if the memory does not hold this version completely.
    """
    memory = _map_file(layout)
    begun, complete = memory[:16].view(torch.int64).tolist()
    if (begun, complete) != (version, version):
        raise MarlRayError(f"weights: expected version {version}, got {complete} and a part of {begun}")
    for entry in layout.entries:
        yield entry.name, _view(memory, entry)


def _map_file(layout: WeightLayout) -> Tensor:
    return torch.from_file(layout.path, shared=True, size=layout.size, dtype=torch.uint8)


def _view(memory: Tensor, entry: TensorPlace) -> Tensor:
    return memory[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
