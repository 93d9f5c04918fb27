"""A backend of vLLM's weight transfer, for a CPU.

vLLM's workers read the weights from memory that they share with the trainer. vLLM's workers import this module because
it holds their extension class, and the import registers the backend.
"""

from dataclasses import dataclass

from typing_extensions import override
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from marl_ray.policies.engines.vllm.process.messages import SHARED_MEMORY
from marl_ray.policies.engines.vllm.process.weight_memory import WeightLayout, read_tensors


@dataclass
class SharedInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM's types are not there where mypy runs
    """No settings, because shared memory needs no connection."""


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One version of all weights."""

    layout: WeightLayout
    version: int


class SharedTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Checks all weights before it loads any, so that refused weights leave the old ones unchanged."""

    init_info_cls, update_info_cls = SharedInit, SharedUpdate

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Do nothing, because memory needs no connection."""

    def start_weight_update(self) -> None:
        """Do nothing yet, because all weights must first be known to exist.

        vLLM takes a model apart before it loads weights.
        """

    def finish_weight_update(self) -> None:
        """Do nothing, because `update_weights` has completed the update."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Replace the weights of this worker's part of the model."""
        self.receive_weights(self.parse_update_info(update_info))

    @override
    def receive_weights(self, update_info: SharedUpdate) -> None:
        weights = list(read_tensors(update_info.layout, update_info.version))
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing, because there is no connection to end."""


class WeightDoor:
    """An extension of vLLM's workers without methods.

    Naming it makes the workers import this module.
    """


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedTransfer)
