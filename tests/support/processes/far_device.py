"""A process group without a CPU backend, as NCCL is, on a machine that has nothing but CPUs.

The group exchanges tensors of the device `privateuseone`, which is made of CPU tensors here. Models are on the CPU and FSDP2
has a group of gloo, so that what is left to the default group are the exchanges of the product's own code.
"""

# mypy: disable-error-code="assignment,attr-defined,call-arg,method-assign,misc,override,return-value"
# torch types neither a group that Python defines nor the attributes of a tensor's subclass.

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from marl_ray.training import collectives

FAR, KEY = "privateuseone", "PrivateUse1"
"""The device's name, and its key among torch's kernels."""
_libraries: list[torch.library.Library] = []


class FarModule:
    """The answers that torch needs about the kind of device."""

    def is_available(self) -> bool:
        return False  # so that checkpoints are written from the CPU, where the models are

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


class FarTensor(torch.Tensor):
    """A tensor on the far device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is copied from it to the CPU is none
    near: torch.Tensor
    """Its numbers."""


def send(near: torch.Tensor) -> FarTensor:
    far = torch._C._acc.create_empty_tensor(near.shape, near.dtype)
    far.__class__ = FarTensor
    far.near = near
    return far


def near_of(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: the CPU's, on the numbers of the far tensors."""
    cpu = torch.device("cpu")
    args, kwargs = pytree.tree_map(near_of, (args, kwargs))
    args = pytree.tree_map(lambda value: cpu if isinstance(value, torch.device) else value, args)
    if kwargs.get("device") is not None:
        kwargs["device"] = cpu
    return pytree.tree_map(lambda value: send(value) if isinstance(value, torch.Tensor) else value, op(*args, **kwargs))


def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    near_of(target).copy_(near_of(source))
    return target


class FarGroup(dist.ProcessGroup):
    """Exchanges tensors of the far device alone."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self.gloo, self.name = dist.ProcessGroupGloo(store, rank, size, timeout), "far"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(FAR)]

    @property
    def group_name(self) -> str:
        return self.name

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def getBackendName(self) -> str:
        return "far"

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.gloo.allreduce(self._near(tensors), options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self.gloo.broadcast(self._near(tensors), options)

    def allgather(self, parts: Any, tensors: Any, options: Any) -> Any:
        return self.gloo.allgather(self._near(parts), self._near(tensors), options)

    def gather(self, parts: Any, tensors: Any, options: Any) -> Any:
        return self.gloo.gather(self._near(parts), self._near(tensors), options)

    def scatter(self, tensors: Any, parts: Any, options: Any) -> Any:
        return self.gloo.scatter(self._near(tensors), self._near(parts), options)

    def barrier(self, options: Any) -> Any:
        return self.gloo.barrier(options)

    def all_gather_single(self, parts: Any, tensor: Any, options: Any) -> Any:
        return self.gloo._allgather_base(self._near(parts), self._near(tensor), options)

    def _near(self, tensors: Any) -> Any:
        def near(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, FarTensor):
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            return tensor.near

        return pytree.tree_map(near, tensors)


def meet(store: str, rank: int) -> None:
    """Make the default group of two processes one without a CPU backend. It ends with the process."""
    _setup_privateuseone_for_python_backend(backend_module=FarModule())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((every, aten))  # kernels go with their library
    every.fallback(compute, KEY)
    aten.impl("_copy_from", copy, KEY)
    aten.impl("empty.memory_format", lambda size, dtype=None, **_: send(torch.empty(size, dtype=dtype)), KEY)
    aten.impl(
        "empty_strided",
        lambda size, stride, dtype=None, **_: send(torch.empty_strided(size, stride, dtype=dtype)),
        KEY,
    )
    dist.Backend.register_backend("far", FarGroup, devices=[FAR])
    dist.init_process_group(f"{FAR}:far", init_method=f"file://{store}", rank=rank, world_size=2)
    shards = dist.new_group(backend="gloo")
    collectives.init_device_mesh = lambda kind, shape: DeviceMesh.from_group(
        shards, kind
    )  # its own would be of the default group
