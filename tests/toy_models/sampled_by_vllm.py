"""Policies that vLLM samples from."""

import torch

from marl_ray.config.run.model import GenerationConfig, LoraConfig, ModelConfig
from marl_ray.policies.engines.vllm_engine import VllmEngine
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy, plain_copy, refresh

CONTEXT = 128


class Sampled:
    """A policy that learns, the copy that samples, and the engine on it."""

    def __init__(self, lora: LoraConfig | None = None, generation: GenerationConfig | None = None):
        model = ModelConfig(preset="tiny-0.2m", context=CONTEXT, lora=lora)
        self.trained = build_token_policy(model, generation or GenerationConfig(max_tokens=24, engine="vllm"), 0)
        self.plain: TokenPolicy = plain_copy(self.trained)
        self.engine = VllmEngine(self.plain)

    def update(self, seed: int = 0) -> None:
        """Move the trained weights as an update does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.trained.lm.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
        refresh(self.plain, self.trained)
