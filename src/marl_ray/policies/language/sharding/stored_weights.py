"""Weights in safetensors files, of which each worker reads its parts.

The files are read by plain calls. A file that is mapped gives no error where it ends early or its storage fails: the
system then kills the process that touches it.
"""

import hashlib
import json
import math
import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from marl_ray.errors import MarlRayError, one_line_without
from marl_ray.policies.language.lora import bare_name
from marl_ray.policies.language.sharding.gather_shards import local_slices

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Number types that float32 contains, so that weights are equal however they are converted on the way, by their names in
safetensors (https://github.com/huggingface/safetensors, section Format)."""
PART_BYTES = 1 << 22
"""Bytes of a weight that are read at once, unless one of its rows has more."""
SAMPLED_BYTES = 1 << 12
"""Bytes of a weight by which files are compared."""


class WeightFile:
    """A file that stays open as long as anything may read from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class StoredTensor:
    """One weight of a file."""

    file: WeightFile
    name: str
    kind: str
    """Name of its number type in safetensors."""
    shape: tuple[int, ...]
    begin: int
    """The weight's first byte in the file."""

    def read_into(self, target: Tensor, part: tuple[slice, ...]) -> None:
        """Copy the part with these indices in each dimension into `target`, of any type and device. Raises MarlRayError."""
        if not target.numel():
            return
        if not self.shape:
            part, target = (slice(0, 1),), target.reshape(1)
        rows, *inner = part
        row_bytes = math.prod(self.shape[1:]) * FLOAT_TYPES[self.kind].itemsize
        step = min(max(1, PART_BYTES // row_bytes), rows.stop - rows.start)
        # Memory that goes back to the system: holes between the weights of a model would stay as long as it does.
        room = torch.frombuffer(mmap(-1, step * row_bytes), dtype=torch.uint8)
        for first in range(rows.start, rows.stop, step):
            end = min(first + step, rows.stop)
            read = room[: (end - first) * row_bytes]
            self._fill(read, self.begin + first * row_bytes)
            values = read.view(FLOAT_TYPES[self.kind]).view(end - first, *self.shape[1:])
            target[first - rows.start : end - rows.start].copy_(values[(slice(None), *inner)])

    def digest(self) -> str:
        """Return the digest (hex) of the type, the shape and the first SAMPLED_BYTES bytes. Raises MarlRayError."""
        size = math.prod(self.shape) * FLOAT_TYPES[self.kind].itemsize
        room = torch.empty(min(size, SAMPLED_BYTES), dtype=torch.uint8)
        self._fill(room, self.begin)
        return hashlib.sha256(f"{self.kind} {self.shape} ".encode() + room.numpy().tobytes()).hexdigest()

    def _fill(self, room: Tensor, begin: int) -> None:
        """Read as many bytes as there is room for, from a place of the file on."""
        view, done = room.numpy().data, 0
        while done < len(view):
            try:
                count = os.preadv(self.file.descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise MarlRayError(
                    f"{self.file.path}: weight {self.name} cannot be read: {one_line_without(error, self.file.path)}"
                ) from error
            if count == 0:
                raise MarlRayError(f"{self.file.path}: the file ends within weight {self.name}")
            done += count


@dataclass(frozen=True)
class StoredWeights:
    """Files of weights, open so that they can still be read after their folder is deleted."""

    tensors: Mapping[str, StoredTensor]
    """Name of a weight -> its place."""

    @torch.no_grad()
    def read_into(self, lm: nn.Module, device: torch.device) -> None:
        """Give a model's weights on the meta device their values, on `device` and in their own type.

        Of a weight that is sharded only this worker's shard is read. Raises MarlRayError, which names the file.
        """
        state: dict[str, nn.Parameter] = {}
        for tied in tied_names(lm):
            parameter = lm.get_parameter(tied[0])
            if parameter.is_meta:
                value = nn.Parameter(self._read(tied, parameter, device), parameter.requires_grad)
                state |= dict.fromkeys(tied, value)
        lm.load_state_dict(state, strict=False, assign=True)

    @torch.no_grad()
    def read_complete(self, tied: list[str], parameter: Tensor, device: torch.device) -> Tensor:
        """Return the complete value of a weight on the meta device, on `device` and in the weight's type.

        The weight has one of the `tied` names. Raises MarlRayError, which names the file.
        """
        value = torch.empty_like(parameter, device=device)
        self._stored_tensor(tied).read_into(value, tuple(slice(0, length) for length in parameter.shape))
        return value

    def digests(self) -> dict[str, str]:
        """Return name of a weight -> digest of its type, its shape and its first bytes.

        By these digests workers know whether they have the same files. Raises MarlRayError, which names the file.
        """
        return {name: stored.digest() for name, stored in self.tensors.items() if stored.kind in FLOAT_TYPES}

    def _stored_tensor(self, tied: list[str]) -> StoredTensor:
        return next(self.tensors[name] for name in map(bare_name, tied) if name in self.tensors)

    def _read(self, tied: list[str], parameter: Tensor, device: torch.device) -> Tensor:
        if not isinstance(parameter, DTensor):
            return self.read_complete(tied, parameter, device)
        mesh, local = parameter.device_mesh, parameter.to_local()
        shard = torch.empty(local.shape, dtype=local.dtype, device=device)
        self._stored_tensor(tied).read_into(shard, local_slices(parameter))
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def open_weights(paths: list[str]) -> StoredWeights:
    """Return the weights of several files.

    Raises OSError or `safetensors.SafetensorError` for a file that is missing, damaged or incomplete, and MarlRayError
    for a weight that two files have.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in map(Path, paths):
        safe_open(str(path), "pt")  # compares the file's length with its header
        file = WeightFile(path)
        (length,) = struct.unpack("<Q", os.pread(file.descriptor, 8, 0))
        header: dict[str, Any] = json.loads(os.pread(file.descriptor, length, 8))
        header.pop("__metadata__", None)
        for name in sorted(header.keys() & tensors.keys()):
            raise MarlRayError(
                f"the weight {name} is in {tensors[name].file.path.name} and in {path.name}, expected one"
            )
        tensors |= {
            name: StoredTensor(file, name, facts["dtype"], tuple(facts["shape"]), 8 + length + facts["data_offsets"][0])
            for name, facts in header.items()
        }
    return StoredWeights(tensors)


def tied_names(lm: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, of which a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())
