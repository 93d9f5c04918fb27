"""Low-rank adapters: nothing of a small one is lost in bfloat16, and peft reads what is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from toy_models.tokens import LORA, add_noise, responses, tiny
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from marl_ray.config.run.model import GenerationConfig, LoraConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.engines.models.cached_forward import ForwardModel
from marl_ray.policies.engines.models.joint_products import join_layers
from marl_ray.policies.engines.models.llama import LlamaModel
from marl_ray.policies.language.lora import LowRankSum, adapted_layers, add_adapters, merged_weights
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy

LINEAGE = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env={}, steps=1, metrics={})


def young(rate: float, dtype: str = "bf16") -> TokenPolicy:
    """A policy whose adapters have taken one step of Adam at this rate; its weights are numbers of bfloat16."""
    model = ModelConfig(preset="tiny-1m", context=64, dtype=dtype, lora=LoraConfig())
    policy = build_token_policy(model, GenerationConfig(max_tokens=8), 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().float()
    for _, layer in adapted_layers(policy.lm):
        up = layer.lora_B["default"].weight
        up.data = rate * torch.randn(up.shape, generator=generator).sign()
    return policy


def full_pass(policy: TokenPolicy, ids: Tensor) -> Tensor:
    states = policy.lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return policy.logits(states.flatten(0, 1)).log_softmax(-1)


def decode(policy: TokenPolicy, ids: Tensor, model: Callable[[TokenPolicy], Any]) -> Tensor:
    """Log-probabilities after the last token of each row, by the model that an engine decodes with."""
    cached = model(policy)
    prefix = cached.prefill(ids[:, :-1])
    cache = torch.cat([prefix, torch.zeros_like(prefix[..., :1, :])], -2)
    positions = torch.full((len(ids),), ids.shape[1] - 1)
    return cached.decode(ids[:, -1], positions, cache, None).float().log_softmax(-1)


WAYS: dict[str, Callable[[TokenPolicy, Tensor], Tensor]] = {
    "evaluation": full_pass,
    "torch": lambda policy, ids: decode(policy, ids, lambda value: LlamaModel(value.lm, 64)),
    "transformers": lambda policy, ids: decode(policy, ids, lambda value: ForwardModel(value.lm)),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_bfloat16_keeps_an_adapter_of_one_step(way):
    """The effect in bfloat16 is that in float32 and noise: its projection on that is about 1.

    Merged weights keep 0.14 of it at this rate, and two rounded outputs that are added 0.21.
    """
    trained = young(2e-5)
    plain = plain_copy(trained)
    assert {value.dtype for value in plain.parameters()} == {torch.bfloat16}
    sizes = (64, 32) if way == "evaluation" else (512, 8)
    ids = torch.randint(0, 256, sizes, generator=torch.Generator().manual_seed(0))
    exact, rounded = (_effect(policy, ids, WAYS[way]) for policy in (trained, plain))
    assert float((exact * rounded).sum() / exact.square().sum()) == pytest.approx(1, abs=0.35)


def _effect(policy: TokenPolicy, ids: Tensor, way: Callable[[TokenPolicy, Tensor], Tensor]) -> Tensor:
    """The difference that the adapters make."""
    there = way(policy, ids)
    for _, layer in adapted_layers(policy.lm):
        layer.lora_B["default"].weight.zero_()
    return there - way(policy, ids)


@torch.no_grad()
def test_merged_weights_add_in_float32():
    policy = young(1e-3)
    plain = plain_copy(policy)
    name, layer = adapted_layers(plain.lm)[0]
    down, up = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
    expected = layer.get_base_layer().weight.double() + 2 * up.double() @ down.double()
    assert torch.equal(merged_weights(plain.lm)[f"{name}.weight"], expected.bfloat16())


def test_the_sums_gradients_are_those_of_its_parts():
    torch.manual_seed(0)
    x, base, bias, down, up = (torch.randn(*s).double() for s in ((2, 3, 5), (4, 5), (4,), (2, 5), (4, 2)))
    for tensor in (x, down, up):
        tensor.requires_grad_(True)
    torch.testing.assert_close(
        LowRankSum.apply(x, base, bias, down, up, 0.5), nn.functional.linear(x, base, bias) + 0.5 * (x @ down.T @ up.T)
    )
    assert torch.autograd.gradcheck(lambda x, down, up: LowRankSum.apply(x, base, bias, down, up, 0.5), (x, down, up))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_in_bfloat16_are_those_in_float32(checkpointing):
    exact, rounded = (tiny(lora=LORA, activation_checkpointing=checkpointing) for _ in range(2))
    rounded.to(torch.bfloat16)
    for policy in (exact, rounded):
        policy.evaluate(*responses()).log_probs.sum().backward()
    pairs = zip(exact.actor_parameters(), rounded.actor_parameters(), strict=True)
    for first, other in pairs:
        assert nn.functional.cosine_similarity(first.grad.flatten(), other.grad.float().flatten(), 0) > 0.95


@torch.no_grad()
def test_a_product_is_its_layers_and_is_written_through():
    policy = plain_copy(add_noise(tiny(lora=LORA | {"targets": ("q_proj", "v_proj")})))
    attention = policy.lm.model.layers[0].self_attn
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    x, made = torch.randn(3, 96), join_layers(*layers)
    torch.testing.assert_close(made(x), torch.cat([layer(x) for layer in layers], -1))
    assert join_layers(*layers).weight.data_ptr() == made.weight.data_ptr()  # not moved again
    for parameter in attention.parameters():
        parameter.normal_()
    torch.testing.assert_close(made(x), torch.cat([layer(x) for layer in layers], -1))


def save(policy: TokenPolicy, folder: Path) -> Path:
    path = save_token_bundle(folder, {"a": "solver"}, {"solver": plain_copy(policy)}, LINEAGE)
    return path / "solver"


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@torch.no_grad()
def test_peft_reads_the_adapter_beside_a_merged_model(tmp_path, dtype, targets):
    policy = tiny(critic=False, signals=0, dtype=dtype, lora=LORA | {"targets": targets})
    plain, bare = plain_copy(policy), tiny(critic=False, signals=0)
    folder = save(policy, tmp_path / "bundle")
    base = {
        name.replace(".base_layer", ""): value for name, value in policy.lm.state_dict().items() if "lora" not in name
    }
    bare.lm.load_state_dict(base)
    bare.lm.to(next(plain.parameters()).dtype).save_pretrained(tmp_path / "base")
    ids = torch.arange(64)[None]
    expected = plain.lm(ids).logits
    tolerance = {"atol": 1e-4, "rtol": 0} if dtype == "fp32" else {"atol": 0.5, "rtol": 0.1}
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder / "adapter")
    assert (read.base_model.model(ids).logits - bare.lm(ids).logits).abs().max() > 1
    torch.testing.assert_close(read(ids).logits, expected, **tolerance)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected, **tolerance)
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 8.0, None)
    assert load_bundle(folder.parent).policies["solver"].config.lora is None


def test_an_adapter_names_the_model_it_belongs_to(tmp_path):
    policy = tiny(critic=False, signals=0)
    policy.lm.save_pretrained(tmp_path / "base")
    policy.tokenizer.save_pretrained(tmp_path / "base")
    model = ModelConfig.model_validate({"path": str(tmp_path / "base"), "context": 64, "lora": LORA})
    folder = save(build_token_policy(model, GenerationConfig(), 0), tmp_path / "bundle")
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")


@torch.no_grad()
def test_peft_reads_adapters_of_transposed_weights(tmp_path):
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3)
    lm = GPT2LMHeadModel(config).eval()
    lm.save_pretrained(tmp_path / "base")
    model = ModelConfig.model_validate({"preset": "tiny-1m", "lora": LORA})
    add_adapters(lm, model.lora)
    policy = add_noise(TokenPolicy(lm, tiny().tokenizer, model, GenerationConfig()))
    stored = {name.replace(".base_layer", ""): value for name, value in lm.state_dict().items() if "lora" not in name}
    base = GPT2LMHeadModel(config)
    base.load_state_dict(stored)
    base.save_pretrained(tmp_path / "base")
    ids = torch.arange(64)[None]
    folder = save(policy, tmp_path / "bundle")
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder / "adapter")
    torch.testing.assert_close(read(ids).logits, lm(ids).logits, atol=1e-4, rtol=0)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(merged(ids).logits, lm(ids).logits, atol=1e-4, rtol=0)


SMALL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
MIXTURES = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=2
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL | {"num_hidden_layers": 2},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[0],
    ),
    "phimoe": PhimoeConfig(**SMALL, num_local_experts=4),  # its routers are made of linear layers
}


def mixture(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(MIXTURES[name]).eval()
    return lm


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_a_mixture_has_adapters_beside_its_experts(tmp_path, name):
    """peft would also put some around the experts, which nothing here switches off, merges or exports."""
    bare, lm = mixture(name), mixture(name)
    model = ModelConfig.model_validate({"preset": "tiny-1m", "context": 64, "lora": LORA})
    add_adapters(lm, model.lora)
    policy = add_noise(TokenPolicy(lm, tiny().tokenizer, model, GenerationConfig()))
    base = {name.replace(".base_layer", ""): value for name, value in lm.state_dict().items() if "lora" not in name}
    bare.load_state_dict(base)
    trained = {name for name, value in lm.named_parameters() if value.requires_grad}
    assert trained == {f"{name}.lora_{part}.default.weight" for name, _ in adapted_layers(lm) for part in "AB"}
    prompts, answers, ids = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]]), torch.arange(64)[None]
    expected = bare(torch.arange(1, 7)[None]).logits[0, 2:5].log_softmax(-1).gather(-1, answers.T)[:, 0]
    log_probs = policy.reference_evaluate(prompts, answers, torch.ones(1, 3, dtype=torch.bool))[0]
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)
    assert (bare(ids).logits - lm(ids).logits).abs().max() > 0.1
    folder = save(policy, tmp_path / "bundle")
    merged = load_bundle(folder.parent).policies["solver"].lm
    torch.testing.assert_close(merged(ids).logits, lm(ids).logits, atol=1e-4, rtol=0)
    read = PeftModel.from_pretrained(bare, folder / "adapter")
    torch.testing.assert_close(read(ids).logits, lm(ids).logits, atol=1e-4, rtol=0)


def test_layers_that_peft_takes_for_experts_are_refused():
    with pytest.raises(MarlRayError, match=r"'down_proj' of architecture qwen3_moe for its experts"):
        add_adapters(mixture("qwen3_moe"), LoraConfig(targets=("down_proj",)))
