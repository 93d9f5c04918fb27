"""How weights enter vLLM's workers."""

from typing import Any

from marl_ray.policies.engines.vllm_process.shared_weights import Layout, read


class WeightDoor:
    """What vLLM's workers can do besides their own; vLLM mixes it into its worker."""

    model_runner: Any

    def load_shared(self, layout: Layout, version: int) -> None:
        """Replace all weights of this worker's part of the model; where they are refused, the old ones stay."""
        self.model_runner.reload_weights(weights_iterator=list(read(layout, version)))
