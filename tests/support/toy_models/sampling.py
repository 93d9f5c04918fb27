"""Small language models of every family that samples by a path of its own, and their responses beside a full pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.base import Completion, Prompt
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy

CONTEXT = 128
"""Tokens."""
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMAS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, yarn": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=YARN)),
    "llama, wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
"""The models of the Llama family, which have a shorter forward pass of the product's own."""
OTHER_MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=259, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2)),
    "a sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
}
"""Models that sample by their own forward pass."""


def add_weight_noise(lm: Any, seed: int = 0) -> Any:
    """Add noise to all weights of a model, biases and norms included, so that distributions are not flat; return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return lm.eval()


def make_policy(lm: Any, tokenizer: Any = None, **generation: Any) -> TokenPolicy:
    config = ModelConfig(preset="tiny-0.2m", context=CONTEXT)
    return TokenPolicy(lm, tokenizer or byte_tokenizer(CONTEXT), config, GenerationConfig(**generation))


def text_prompts(count: int = 4, group: int = 3) -> list[Prompt]:
    """`group` responses each to `count` prompts of different lengths, the first of one token."""
    return [
        Prompt(tuple(range(40, 41 + 5 * number)), stream=100 * number + member)
        for number in range(count)
        for member in range(group)
    ]


def rows_of(prompts: list[Prompt], completions: list[Completion]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The prompts, responses, mask and log-probabilities, laid out as in Trajectories."""
    before, after = max(len(p.ids) for p in prompts), max(len(c.ids) for c in completions)
    ids = torch.full((len(prompts), before), -1)
    responses = torch.zeros(len(prompts), after, dtype=torch.long)
    log_probs = torch.zeros(len(prompts), after)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, before - len(prompt.ids) :] = torch.tensor(prompt.ids)
        responses[row, : len(completion.ids)] = torch.tensor(completion.ids)
        log_probs[row, : len(completion.ids)] = torch.tensor(completion.log_probs)
    return ids, responses, torch.arange(after) < torch.tensor([[len(c.ids)] for c in completions]), log_probs


def largest_difference(policy: TokenPolicy, prompts: list[Prompt], completions: list[Completion]) -> float:
    """The largest between log-probabilities of the sampling pass and of a full pass."""
    ids, responses, mask, log_probs = rows_of(prompts, completions)
    with torch.no_grad():
        full = policy.evaluate(ids, responses, mask).log_probs
    return float((full - log_probs).abs().max())


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]
