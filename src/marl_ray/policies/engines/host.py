"""The functions of an engine that an actor of `resources.engines` needs, and the form in which weights come to it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from marl_ray.config.run.engines import engine_spec
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import import_reference
from marl_ray.policies.engines.base import Completion, Prompt

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy


class HostTransfer(StrEnum):
    """The way that weights come to a host."""

    NCCL = "nccl"
    """From the trainer's GPU to the host's own, through `EngineHost.receive_weights`."""
    OBJECT_STORE = "shared"
    """Through Ray's object store, where all hosts of a machine read one copy, and `EngineHost.load`."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes that Ray hands to another process without pickling them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    """(bytes,) uint8"""


def pack_tensor(tensor: Tensor) -> PackedTensor:
    """Return a copy of the tensor's present values, from any device."""
    plain = tensor.detach().cpu().contiguous()
    return PackedTensor(plain.dtype, tuple(plain.shape), plain.flatten().view(torch.uint8).numpy())


def unpack_tensor(tensor: PackedTensor) -> Tensor:
    """Return the tensor on CPU. Do not write to it, because other processes may read the same memory."""
    return (
        torch.frombuffer(tensor.data, dtype=tensor.dtype).view(tensor.shape)
        if tensor.data.size
        else torch.empty(tensor.shape, dtype=tensor.dtype)
    )


class WeightGroup(Protocol):
    """The trainer's side of a group of NCCL, through which a GPU sends weights to those of all engines at once."""

    def member(self, engine: int) -> dict[str, Any]:
        """Return the `connection` by which the host of an engine joins the group."""

    def join(self) -> None:
        """Join as the trainer, together with all engines."""

    def update(self, weights: Mapping[str, Tensor]) -> dict[str, object]:
        """Return the `update` by which a host takes tensors of these names, shapes and types."""

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send tensors to the engines, which must be taking them, and return before the tensors have arrived."""


class EngineHost(Protocol):
    """A copy of a policy and an engine with its weights, which write the responses of several callers together.

    The methods may be called from several threads at once.
    """

    def __init__(
        self, policy: "TokenPolicy", tensor_parallel: int, memory_share: float, transfer: HostTransfer
    ) -> None:
        """Own `policy` from now on; its weights count as version `policy.version`.

        The host spreads the model over `tensor_parallel` GPUs and takes `memory_share` of their memory. With the
        `transfer` OBJECT_STORE weights on the meta device are zeros until they are loaded.
        """

    @staticmethod
    def weight_group(address: str, port: int, engines: int, tensor_parallel: int) -> WeightGroup:
        """Return the group of a trainer at `address`, with `engines` hosts of `tensor_parallel` GPUs each.

        Raises MarlRayError for hosts that cannot take weights in this way.
        """
        raise MarlRayError("the engine takes no weights from the trainer's GPU")

    @staticmethod
    def reports_trained(trained: GenerationConfig, generation: GenerationConfig) -> bool:
        """Return True if a policy's host reports for `generation` the log-probabilities that are trained on.

        `trained` are the policy's own options: the log-probabilities are at their temperature, over all tokens. If the
        host does not report them, the worker that asks computes them in a pass.
        """
        return True

    def start(self) -> None:
        """Start what sampling needs, so that the first call need not wait for it. Raises EngineRefusedError if it cannot."""

    def load(self, version: int, weights: Mapping[str, PackedTensor], complete: bool = True) -> None:
        """Load changed weights as `version`, or, if they are not `complete`, a part of that version.

        The weights have the names of `policy.lm`'s parameters with or without its adapters. Raises MarlRayError for a
        version that is not newer, for a tensor that the model lacks or has in another type or shape, and while
        responses are being written, which would mix two versions.
        """

    def join(self, connection: dict[str, Any]) -> None:
        """Join the NCCL group through which weights will come (see `WeightGroup.member`)."""

    def receive_weights(self, version: int, update: dict[str, Any]) -> None:
        """Receive the weights of `version` from the group (see `WeightGroup.update`). Raises the errors of `load`."""

    def generate(
        self, version: int, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig
    ) -> list[Completion]:
        """Return the responses by the weights of `version`, after waiting for these.

        Raises MarlRayError if newer weights are loaded, and EngineLostError if the version does not arrive.
        """

    def progress(self) -> int:
        """Return the number of tokens written so far."""

    def close(self) -> None:
        """End all that the host has started."""


def engine_host(engine: str) -> type[EngineHost]:
    """Return the class of an engine's hosts. Raises MarlRayError if the engine cannot run in actors."""
    host = engine_spec(engine).host
    if host is None:
        raise MarlRayError(f"generation.engine={engine} cannot run in actors")
    host_class: type[EngineHost] = import_reference(host)
    return host_class
