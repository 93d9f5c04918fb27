"""Bundles of language models: transformers reads them as they are, bit for bit, and nothing that was touched is read."""

import json
from pathlib import Path

import pytest
import torch
from toy_models.tokens import LORA, responses, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.language import TokenBundle, save_token_bundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.policies.language.lora import merged_weights
from marl_ray.policies.language.sampling_copy import plain_copy
from marl_ray.policies.language.token_policy import TokenPolicy, build_token_policy

LINEAGE = Lineage(run="r", algorithm={}, config_hash="c", code_version="0", seed=0, env={}, steps=1, metrics={})


@pytest.fixture(scope="module")
def policies() -> dict[str, TokenPolicy]:
    return {"asker": plain_copy(tiny(chat=False)), "solver": plain_copy(tiny(lora=LORA, dtype="bf16"))}


@pytest.fixture
def folder(tmp_path: Path, policies: dict[str, TokenPolicy]) -> Path:
    return save_token_bundle(tmp_path, {"a": "asker", "b": "solver"}, policies, LINEAGE)


def test_a_bundle_holds_the_policies_bit_for_bit(folder, policies):
    bundle = load_bundle(folder)
    assert isinstance(bundle, TokenBundle)
    assert bundle.agents == {"a": "asker", "b": "solver"}
    assert folder.name == bundle.digest[:16]
    assert list(bundle.policies) == ["asker", "solver"]
    for name, policy in policies.items():
        read = bundle.policies[name]
        assert read is bundle.policies[name]
        assert (read.generation, read.config.chat, read.config.context) == (
            policy.generation,
            policy.config.chat,
            policy.config.context,
        )
        weights, expected = read.lm.state_dict(), merged_weights(policy.lm)
        assert set(weights) == set(expected)
        for key, value in expected.items():
            assert torch.equal(weights[key], value.float())
        assert not any(parameter.requires_grad for parameter in read.parameters())
        text = "π\n<|end|> e\u0301"
        assert len(read.tokenizer) == 259
        assert read.tokenizer.encode(text) == policy.tokenizer.encode(text)


def test_transformers_reads_a_policy_as_it_is(folder, policies):
    model = AutoModelForCausalLM.from_pretrained(folder / "solver")
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder / "solver")
    for text in ("ab", "e\u0301 \u212b", "  a\n\n", "<|end|>", "<|endoftext|>"):
        assert tokenizer.encode(text) == policies["solver"].tokenizer.encode(text)
    assert tokenizer.chat_template == policies["solver"].tokenizer.chat_template
    ids = tokenizer("ab", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits, policies["solver"].lm(ids).logits, atol=0.1, rtol=0.05)
    asker = AutoModelForCausalLM.from_pretrained(folder / "asker")
    assert torch.equal(asker(ids).logits, policies["asker"].lm(ids).logits)
    assert sorted(path.name for path in (folder / "solver").iterdir()) == [
        "adapter",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_equal_content_has_an_equal_digest(folder, tmp_path, policies):
    again = save_token_bundle(tmp_path / "again", {"a": "asker", "b": "solver"}, policies, LINEAGE)
    assert again.name == folder.name
    other = LINEAGE.model_copy(update={"run": "another"})
    renamed = {"x": policies["asker"], "y": policies["solver"]}
    elsewhere = load_bundle(save_token_bundle(tmp_path / "b", {"a": "x", "b": "y"}, renamed, other)).manifest
    swapped = load_bundle(save_token_bundle(tmp_path / "c", {"a": "y", "b": "x"}, renamed, other)).manifest
    manifest = load_bundle(folder).manifest
    assert manifest.digest != elsewhere.digest and manifest.weights_sha256 == elsewhere.weights_sha256
    assert manifest.weights_sha256 != swapped.weights_sha256
    read = {"asker": load_bundle(folder).policies["asker"]}
    for number in range(2):  # however often it is read and written
        path = save_token_bundle(tmp_path / str(number), {"a": "asker"}, read, LINEAGE)
        read = {"asker": load_bundle(path).policies["asker"]}
    assert (tmp_path / "0" / path.name).is_dir()


def test_a_bundle_is_a_model_to_begin_with(folder, tmp_path, policies):
    expected = policies["asker"].evaluate(*responses()).log_probs
    only = save_token_bundle(tmp_path / "one", {"a": "asker"}, {"asker": policies["asker"]}, LINEAGE)
    for path in (only, folder / "asker"):
        config = ModelConfig(path=str(path), context=64)
        policy = build_token_policy(config, policies["asker"].generation, 1)
        assert torch.equal(policy.evaluate(*responses()).log_probs, expected)
        assert policy.actor_parameters()
    with pytest.raises(MarlRayError, match="is a bundle of asker, solver: expected the folder of one of them"):
        build_token_policy(ModelConfig(path=str(folder)), GenerationConfig(), 1)


def _flip(folder: Path) -> None:
    path = folder / "solver" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def _edit(folder: Path) -> None:
    path = folder / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"agents": {"c": "asker"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "content hash of solver/model.safetensors does not fit"),
        (lambda folder: (folder / "asker" / "config.json").write_text("{}"), "content hash of asker/config.json"),
        (lambda folder: (folder / "asker" / "tokenizer.json").unlink(), "asker/tokenizer.json is missing"),
        (
            lambda folder: (folder / "asker" / "adapter_config.json").write_text("{}"),
            "asker/adapter_config.json is not in",
        ),
        (_edit, "content hash of bundle.json does not fit"),
        (
            lambda folder: (folder / "bundle.json").write_text('{"family": "token"}'),
            "bundle.json: missing key 'agents'",
        ),
        (lambda folder: (folder / "bundle.json").write_text('{"family": "other"}'), "of 'other' is not supported"),
    ],
)
def test_a_touched_bundle_is_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(MarlRayError, match=message) as caught:
        load_bundle(folder)
    assert "\n" not in str(caught.value)


def test_a_policys_name_cannot_lead_out_of_the_bundle(folder):
    path = folder / "bundle.json"
    bundle = load_bundle(folder)
    assert isinstance(bundle, TokenBundle)
    manifest = bundle.manifest
    manifest.policies = {"../asker": manifest.policies["asker"]}
    manifest.digest = manifest.content_digest()
    path.write_text(manifest.model_dump_json())
    with pytest.raises(MarlRayError, match=r"policy '../asker' must be a plain folder name"):
        load_bundle(folder)
