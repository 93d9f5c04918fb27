"""Architectures that cannot be sampled from are refused by name, before anything starts."""

import json

import pytest
from toy_models.tokenizers import bytes_with
from toys.texts import TWO_AGENTS, TWO_POLICIES, config
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.models.architectures import DECODED_TYPES, PAGED_TYPES, SCORED_TYPES, check_architecture
from marl_ray.policies.language.tiny_models import byte_tokenizer, tiny_model
from marl_ray.training.run_checks import check_run


@pytest.mark.parametrize(
    ("architecture", "engine", "expected"),
    [
        ("mamba", "torch", "generation.engine=vllm, or a causal decoder that keeps keys and values, such as llama"),
        ("deepseek_v3", "transformers", "generation.engine=vllm, or a causal decoder"),
        ("bloom", "transformers", "generation.engine=torch, or a causal decoder"),
        ("bert", "torch", "expected a causal decoder"),
        ("bart", "vllm", "expected a causal decoder"),
        ("mamba", "toys.engines:Plain", "generation.engine=vllm, or a causal decoder"),
    ],
)
def test_what_an_engine_cannot_sample_from_is_refused(architecture, engine, expected):
    with pytest.raises(
        MarlRayError, match=f"here: architecture {architecture} .*engine={engine}: .*{expected}"
    ) as caught:
        check_architecture(CONFIG_MAPPING[architecture](), engine, 64, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "is_causal", False),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("doge", "is_moe", True),
    ],
)
def test_what_looks_ahead_is_refused(architecture, key, value):
    """Embedding models made of decoders do so, and a mixture whose routing mixes tokens."""
    kind = CONFIG_MAPPING[architecture]()
    check_architecture(kind, "vllm", 64, "here")
    setattr(kind, key, value)
    with pytest.raises(MarlRayError, match=f"architecture {architecture} with {key}={value} lets a token depend on"):
        check_architecture(kind, "vllm", 64, "here")


def test_layers_without_keys_are_named():
    kind = CONFIG_MAPPING["lfm2"]()
    kind.layer_types = ["conv", "full_attention"]
    with pytest.raises(MarlRayError, match="architecture lfm2 with layers of conv cannot be sampled from"):
        check_architecture(kind, "torch", 64, "here")
    with pytest.raises(
        MarlRayError, match=r"expected generation\.engine=vllm, or"
    ):  # `torch` has no such layers either
        check_architecture(kind, "transformers", 64, "here")
    assert PAGED_TYPES < DECODED_TYPES < SCORED_TYPES


def test_positions_that_depend_on_the_batch_are_refused():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    kind = Phi3Config(**sizes, original_max_position_embeddings=32, rope_parameters=rope, pad_token_id=0)
    check_architecture(kind, "torch", 32, "here")
    with pytest.raises(MarlRayError, match=r"model\.context=64: expected at most 32"):
        check_architecture(kind, "torch", 64, "here")


@pytest.mark.parametrize("kind", ["mamba", "bert", "t5", "qwen3_next"])
def test_a_dry_run_refuses_in_one_line(tmp_path, kind):
    byte_tokenizer(32).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 300}))
    model = f"team.speaker.model={{path: {tmp_path}, context: 32}}"
    with pytest.raises(MarlRayError, match=rf"model.path '{tmp_path}'") as caught:
        check_run(config(f"storage={tmp_path}/runs", model))
    assert "\n" not in str(caught.value)


def test_a_dry_run_refuses_a_model_without_weights_or_with_too_few_tokens(tmp_path):
    byte_tokenizer(32).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    run_config = config(f"storage={tmp_path}/runs", f"team.speaker.model={{path: {tmp_path}, context: 32}}")
    for tokens, message in (
        (200, "its tokenizer has 259 tokens, it has 200"),
        (259, "has no weights: expected one of"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": tokens, **sizes}))
        with pytest.raises(MarlRayError, match=rf"model.path '{tmp_path}':? {message}"):
            check_run(run_config)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    check_run(run_config)


def test_a_dry_run_reads_the_template_of_every_policy(tmp_path):
    """Not only that of the agent that acts first."""
    tokenizer = bytes_with("{{ raise_exception('no') }}")
    lm = tiny_model("tiny-0.2m", tokenizer, 32)
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    second = f"team.second.model={{path: {tmp_path}, context: 32}}"
    with pytest.raises(
        MarlRayError, match=r"team\.second\.model\.chat: the chat template of .* does not show what a user says"
    ):
        check_run(config(f"storage={tmp_path}/runs", TWO_AGENTS, TWO_POLICIES, second))
