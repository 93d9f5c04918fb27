"""Configs of language models: their source, their adapters, and the sampling of responses."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from marl_ray.config.base import Config

Preset = Literal["tiny-0.2m", "tiny-1m", "tiny-6m"]
"""Models built without a download: a byte-level tokenizer and a small decoder with random weights."""
DEFAULT_ENGINE = "torch"
"""The built-in decoder, which samples and serves where a config names no engine."""


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) beside frozen weights."""

    rank: PositiveInt = 16
    """Inner width of an adapter."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter."""


class ModelConfig(Config):
    """A causal language model in Hugging Face format, from exactly one of `path` and `preset`."""

    path: str | None = None
    """A folder, a name that transformers knows, or `models:/name/version`."""
    preset: Preset | None = None
    """A small model with random weights, drawn from the run's seed."""
    lora: LoraConfig | None = None
    """Train adapters only; the reference policy is then the model without them."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the weights that sample; `auto` is fp32 on CPU and bf16 on GPU."""
    context: PositiveInt = 1024
    """Maximum number of tokens of a prompt and its response together; longer prompts are shortened."""
    chat: bool | None = None
    """Wrap prompts in the tokenizer's chat template; when not given, if the tokenizer has one."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, layer by layer."""
    cpu_offload: bool = False
    """Keep the sharded weights, gradients and the optimiser's state in main memory; without effect on a CPU."""

    @model_validator(mode="after")
    def _check_one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.preset is None):
            raise ValueError("expected exactly one of `path` and `preset`")
        return self


class GenerationConfig(Config):
    """Options of the sampling of responses."""

    max_tokens: PositiveInt = 64
    """Maximum number of tokens of a response, its end included."""
    temperature: PositiveFloat = 1.0
    """Log-probabilities, in sampling and in training, are of the distribution at this temperature."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 among all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the fewest tokens that together have this probability."""
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these, special tokens included; end tokens always end it."""
    engine: str = DEFAULT_ENGINE
    """Decoder: `torch`, the built-in batched one; `transformers`, its continuous batching; `vllm` (an extra); or
    `package.module:NAME` of an engine of your own."""
