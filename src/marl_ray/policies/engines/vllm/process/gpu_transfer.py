"""The trainer's side of vLLM's own transfers of weights between GPUs.

`ipc`: the engine shares the trainer's GPU and reads its memory. `nccl`: engines have GPUs of their own, and the trainer
broadcasts to all of them at once. Each weight is sent by itself, so that both sides agree without further settings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from typing_extensions import override

from marl_ray.policies.engines.host import WeightGroup


def ipc_update(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the message by which an engine on the same GPU reads these tensors, which must exist until then."""
    handles = []
    for tensor in tensors.values():
        gpu = str(torch.cuda.get_device_properties(tensor.device).uuid)
        handles.append({gpu: reduce_tensor(tensor)[1]})
    return nccl_update(tensors) | {"ipc_handles": handles}


def nccl_update(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the message that tells an engine which tensors it will receive."""
    return {
        "names": [*tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [[*tensor.shape] for tensor in tensors.values()],
    }


@dataclass
class NcclGroup(WeightGroup):
    """The group of the trainer, which is rank 0, and all processes of all engines."""

    address: str
    port: int
    engines: int
    tensor_parallel: int
    communicator: Any = None
    """vLLM's own, once the trainer has joined."""

    @override
    def member(self, engine: int) -> dict[str, Any]:
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1 + engine * self.tensor_parallel,
            "world_size": self.size,
            "packed": False,
        }

    @property
    def size(self) -> int:
        """Number of processes: the trainer's, and one for each GPU of each engine."""
        return 1 + self.engines * self.tensor_parallel

    @override
    def join(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        place = {"master_address": self.address, "master_port": self.port, "world_size": self.size}
        self.communicator = trainer_init(place)

    @override
    def update(self, weights: Mapping[str, Tensor]) -> dict[str, object]:
        return nccl_update(weights)

    @override
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
