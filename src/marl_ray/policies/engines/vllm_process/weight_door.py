"""The way of weights into vLLM's workers."""

from typing import Any

from marl_ray.policies.engines.vllm_process.shared_weights import WeightLayout, read


class WeightDoor:
    """A method that vLLM's workers get besides their own; vLLM mixes this class into theirs."""

    model_runner: Any

    def load_shared(self, layout: WeightLayout, version: int) -> None:
        """Replace all weights of this worker's part of the model; where they are refused, the old ones stay."""
        self.model_runner.reload_weights(weights_iterator=list(read(layout, version)))
