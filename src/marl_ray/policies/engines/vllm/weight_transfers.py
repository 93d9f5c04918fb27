"""The ways in which weights come to vLLM's process, each of them one backend of vLLM's weight transfer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from typing_extensions import override

from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.vllm.process.child import VllmProcess
from marl_ray.policies.engines.vllm.process.gpu_transfer import ipc_update
from marl_ray.policies.engines.vllm.process.messages import IPC, NCCL, SHARED_MEMORY
from marl_ray.policies.engines.vllm.process.weight_memory import SharedWeights
from marl_ray.policies.language.lora import bare_weights
from marl_ray.policies.language.sampling_copy import group_into_parts, sampled_weights, sampling_weights

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy


class WeightTransfer(Protocol):
    """One way in which a policy's weights, without those of its adapters, come to vLLM's process."""

    backend: ClassVar[str]
    """Name of the backend of vLLM's weight transfer."""
    connection: ClassVar[dict[str, object] | None]
    """Settings with which a new process prepares the transfer; None if it must join a group through `VllmEngine.join`."""
    shares_gpu: ClassVar[bool]
    """True if the process and the trainer are on one GPU."""

    @property
    def is_repeatable(self) -> bool:
        """True if a process that replaces another one can get the same weights again."""

    def take(self, start: Callable[[], VllmProcess], version: int) -> bool:
        """Take the changed weights of an empty copy, which exist only one after another.

        `start` returns the process, and starts it if there is none. Returns True if the process has the weights as
        `version` afterwards, and False if `send` hands them over.
        """

    def send(self, process: VllmProcess, version: int) -> bool:
        """Hand over the policy's current weights as `version`.

        Returns False if the process gets its weights from a group alone. Raises MarlRayError if `take` has not taken the
        current weights of an empty copy.
        """


class SharedMemoryTransfer(WeightTransfer):
    """Weights for a process on a CPU, which reads them from memory that it shares with the trainer."""

    backend = SHARED_MEMORY
    connection: ClassVar[dict[str, object] | None] = {}
    shares_gpu = False
    is_repeatable = True

    def __init__(self, policy: "TokenPolicy") -> None:
        self._policy = policy
        self.memory = SharedWeights(sampled_weights(policy))
        """The memory that the process reads."""
        self._taken: int | None = None
        """`TokenPolicy.version` of the empty copy's weights that are in the memory; None before the first."""
        self._fills = 0
        """The version of the memory, which counts the times that it was filled from an empty copy."""

    @override
    def take(self, start: Callable[[], VllmProcess], version: int) -> bool:
        if not self._has_current_weights():
            self.memory.fill(self._fills + 1, sampling_weights(self._policy))
            self._fills += 1
            self._taken = self._policy.version
        return False

    @override
    def send(self, process: VllmProcess, version: int) -> bool:
        if self._policy.source is None:
            self.memory.write(version, bare_weights(self._policy.lm))
            memory_version = version
        elif self._has_current_weights():
            memory_version = self._fills
        else:
            raise _missing_weights(self._policy)
        process.ask("load", version, {"layout": self.memory.layout, "version": memory_version})
        return True

    def _has_current_weights(self) -> bool:
        """Return True if the memory has an empty copy's weights; those below an adapter never change."""
        policy = self._policy
        return self._taken is not None and (policy.config.lora is not None or self._taken == policy.version)


class IpcTransfer(WeightTransfer):
    """Weights for a process that shares the trainer's GPU and reads them from its memory."""

    backend = IPC
    connection: ClassVar[dict[str, object] | None] = {"packed": False}
    shares_gpu = True

    def __init__(self, policy: "TokenPolicy") -> None:
        self._policy = policy

    @property
    def is_repeatable(self) -> bool:
        """False for an empty copy, whose weights are nowhere once the process has read them."""
        return self._policy.source is None

    @override
    def take(self, start: Callable[[], VllmProcess], version: int) -> bool:
        process = start()
        process.ask("begin_load", version)
        for part in group_into_parts(sampling_weights(self._policy)):
            torch.cuda.synchronize()  # kernels that write the weights may still be running
            process.ask("load_part", ipc_update(part))
        process.ask("finish_load", version)
        return True

    @override
    def send(self, process: VllmProcess, version: int) -> bool:
        if self._policy.source is not None:
            raise _missing_weights(self._policy)
        weights = bare_weights(self._policy.lm)
        torch.cuda.synchronize()  # kernels that write the weights may still be running
        process.ask("load", version, ipc_update(weights))
        return True


class NcclTransfer(WeightTransfer):
    """Weights that the trainer's GPU sends to a group, and that come through `VllmEngine.receive_weights` alone."""

    backend = NCCL
    connection: ClassVar[dict[str, object] | None] = None
    shares_gpu = False
    is_repeatable = False

    def __init__(self, policy: "TokenPolicy") -> None:
        """Read nothing of the policy."""

    @override
    def take(self, start: Callable[[], VllmProcess], version: int) -> bool:
        return False

    @override
    def send(self, process: VllmProcess, version: int) -> bool:
        return False


TRANSFERS: dict[str, Callable[["TokenPolicy"], WeightTransfer]] = {
    IPC: IpcTransfer,
    NCCL: NcclTransfer,
    SHARED_MEMORY: SharedMemoryTransfer,
}
"""Backend of vLLM's weight transfer -> its class here."""


def _missing_weights(policy: "TokenPolicy") -> MarlRayError:
    return MarlRayError(f"generation.engine=vllm: version {policy.version} of the weights has not come")
