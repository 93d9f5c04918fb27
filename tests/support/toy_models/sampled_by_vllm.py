"""Policies that vLLM samples from."""

from pathlib import Path

import torch
from toy_serving.gateways import LINEAGE

from marl_ray.config.run.model import GenerationConfig, LoraConfig, ModelConfig
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.engines.vllm.engine import VllmEngine
from marl_ray.policies.language.sampling_copy import plain_copy, refresh
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy

CONTEXT = 128
"""Tokens."""


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


def lora_bundle(folder: Path, seed: int, base: int = 0, rank: int = 4, context: int = 64) -> str:
    """A bundle of one policy `lm`: an adapter drawn from `seed` beside a base model drawn from `base`."""
    model = ModelConfig(preset="tiny-0.2m", context=context, lora=LoraConfig(rank=rank, alpha=2 * rank))
    trained = build_token_policy(model, GenerationConfig(max_tokens=12, temperature=0.8), base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trained.lm.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
        trained.lm.get_input_embeddings().weight[trained.tokenizer.eos_token_id] = 0  # few responses end by themselves
    return str(save_token_bundle(folder, {"writer": "lm"}, {"lm": plain_copy(trained)}, LINEAGE))
