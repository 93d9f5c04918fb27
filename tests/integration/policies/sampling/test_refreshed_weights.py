"""Engines whose weights a refresh replaces, those of adapters included."""

import pytest
import torch
from toy_models.sampling import (
    CONTEXT,
    LLAMAS,
    OTHER_MODELS,
    add_weight_noise,
    ids_of,
    largest_difference,
    text_prompts,
)

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.engines.choice import make_engine
from marl_ray.policies.language.lora import add_adapters, without_adapters
from marl_ray.policies.language.sampling_copy import plain_copy, refresh
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy


def test_a_refresh_needs_no_new_engine():
    trained = build_token_policy(ModelConfig(preset="tiny-0.2m", context=CONTEXT), GenerationConfig(max_tokens=9), 0)
    plain = plain_copy(trained)
    engine, prompts = make_engine(plain), text_prompts()
    before = engine.generate(prompts, 0)
    add_weight_noise(trained.lm)
    refresh(plain, trained)
    after = engine.generate(prompts, 0)
    assert ids_of(after) != ids_of(before)
    assert largest_difference(trained, prompts, after) < 1e-5
    for parameter in plain.parameters():  # replaced, not written to
        parameter.data = torch.zeros_like(parameter)
    assert largest_difference(plain, prompts, engine.generate(prompts, 0)) < 1e-5


ADAPTED = {
    "gpt2": ("all-linear", "torch"),
    "biases": ("all-linear", "torch"),
    "llama": (["q_proj", "down_proj", "lm_head"], "torch"),
    "llama, wide heads": (["v_proj", "gate_proj", "o_proj"], "torch"),
    "qwen2": ("all-linear", "torch"),
    "qwen3": ("all-linear", "transformers"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_every_engine_adds_adapters_to_what_it_samples_with(name):
    """Also those that came with a refresh in place, after which the engine is the same."""
    torch.manual_seed(0)  # weights, and with them the rounding, do not depend on the tests before
    targets, engine = ADAPTED[name]
    model = ModelConfig.model_validate({"preset": "tiny-0.2m", "context": CONTEXT, "lora": {"rank": 3, "alpha": 4}})
    lora = model.lora.model_copy(update={"targets": targets})
    lm = add_weight_noise((LLAMAS | OTHER_MODELS)[name]())
    add_adapters(lm, lora)
    trained = TokenPolicy(lm, byte_tokenizer(CONTEXT), model, GenerationConfig(max_tokens=8, engine=engine))
    plain, prompts = plain_copy(trained), text_prompts()
    sampler = make_engine(plain)
    for seed in range(2):
        completions = sampler.generate(prompts, 0)
        assert largest_difference(trained, prompts, completions) < 1e-5
        assert largest_difference(plain, prompts, completions) < 1e-5
        with torch.no_grad(), without_adapters(trained.lm):
            assert seed == 0 or largest_difference(trained, prompts, completions) > 0.1
        for parameter in trained.actor_parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        refresh(plain, trained)
