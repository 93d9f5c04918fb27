"""Weights that stay in their files until a policy is sharded or copied are those of a model that is read at once."""

import errno
import json
import os
import re

import pytest
import torch
import transformers
from safetensors.torch import load, load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from toy_models.tokens import LORA, responses, tiny
from toy_serving.gateways import LINEAGE
from toys import texts

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.language import save_token_bundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.language.lora import bare_name
from marl_ray.policies.language.model_files import check_files, empty_model
from marl_ray.policies.language.sampling_copy import frozen_copy, plain_copy
from marl_ray.policies.language.sharding.hugging_face import write_model
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import build_token_policy
from marl_ray.training.run_checks import check_run
from marl_ray.training.single_process import process_group
from marl_ray.training.team.families.language_teams import build_models

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 257,
}


def save_model(folder, architecture="Qwen2", dtype=torch.float32, shards="10GB", **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**SIZES | settings)
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    lm.save_pretrained(folder, max_shard_size=shards)
    byte_tokenizer(64).save_pretrained(folder)
    return folder


def build_policy(folder, unread, **model):
    config = ModelConfig.model_validate({"path": str(folder), "context": 64} | model)
    return build_token_policy(config, GenerationConfig(), 3, True, 1, unread=unread)


def same(first, other):
    """True if two policies have the same names, numbers and types."""
    pairs = [list(policy.named_parameters(remove_duplicate=False)) for policy in (first, other)]
    pairs[0] += first.named_buffers()
    pairs[1] += other.named_buffers()
    return len(pairs[0]) == len(pairs[1]) and all(
        name == also and a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(local(a), local(b))
        for (name, a), (also, b) in zip(*pairs, strict=True)
    )


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("stored", "model", "mixed"),
    [
        ({"tie_word_embeddings": True}, {}, False),
        ({"tie_word_embeddings": False, "dtype": torch.bfloat16, "shards": "20KB"}, {"dtype": "bf16"}, True),
        ({"architecture": "Llama", "dtype": torch.float16}, {"lora": LORA}, True),
        ({"architecture": "Gemma2", "head_dim": 16}, {"lora": LORA, "dtype": "bf16"}, False),
    ],
)
def test_policies_are_the_same_to_the_bit(tmp_path, stored, model, mixed):
    folder = save_model(tmp_path, **stored)
    late, early = (build_policy(folder, unread, **model) for unread in (True, False))
    assert late.unread is not None and early.unread is None
    assert {parameter.device.type for parameter in late.lm.parameters() if not parameter.requires_grad} <= {"meta"}
    assert late.lm.config.to_dict() == early.lm.config.to_dict()
    assert late.lm.generation_config.to_dict() == early.lm.generation_config.to_dict()
    assert late.end_tokens == early.end_tokens and late.lm.training == early.lm.training
    # What was opened can be read after a downloaded folder is deleted.
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with process_group():
        mesh = init_device_mesh("cpu", (1,))
        fixed, plain = ([make(policy) for policy in (late, early)] for make in (frozen_copy, on_cpu))
        for pair in (fixed, (late, early)):
            for policy in pair:
                shard(policy, mesh, mixed)
        for first, other in (plain, fixed, (late, early)):
            assert same(first, other) and first.unread is None
            tied = [
                policy.lm.get_input_embeddings().weight is policy.lm.get_output_embeddings().weight
                for policy in (first, other)
            ]
            assert tied[0] == tied[1]
            assert torch.equal(first.evaluate(*responses()).log_probs, other.evaluate(*responses()).log_probs)
        for policy in (late, early):
            policy.evaluate(*responses()).log_probs.sum().backward()
        for first, other in zip(late.actor_parameters(), early.actor_parameters(), strict=True):
            assert torch.equal(local(first.grad), local(other.grad))
        assert len(list(late.parameters())) == len(list(early.parameters()))


def on_cpu(policy):
    return plain_copy(policy, torch.device("cpu"))


def test_what_only_transformers_can_read_is_read_at_once(tmp_path):
    tiny().lm.save_pretrained(tmp_path)
    assert empty_model(str(tmp_path), 64) is not None
    weights = load_file(tmp_path / "model.safetensors")
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}  # transformers does not tie these
    without_prefix = {name.removeprefix("model."): value for name, value in weights.items()}
    for other in (both, without_prefix):
        save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
        assert empty_model(str(tmp_path), 64) is None


def test_files_that_are_missing_cut_short_or_of_another_model_are_named(tmp_path):
    folder = save_model(tmp_path, shards="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard_file = folder / index["model.layers.1.mlp.up_proj.weight"]
    content = shard_file.read_bytes()

    def refused(message):
        with pytest.raises(MarlRayError, match=message) as caught:
            build_policy(folder, True)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)

    shard_file.unlink()
    refused(rf"is no causal language model: .*{shard_file.name}")
    shard_file.write_bytes(content[:-100])
    refused(rf"is no causal language model: .*{shard_file.name}")
    other = load(content) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 5)}
    save_file(other, shard_file, {"format": "pt"})
    refused(r"its weight model\.layers\.1\.mlp\.up_proj\.weight is \[3, 5\], expected \[64, 32\]")
    save_file({"another.weight": torch.zeros(3, 5)}, shard_file, {"format": "pt"})
    refused(r"lacks \d+ weights of its model")


@pytest.mark.parametrize("lora", ["", ", lora: {rank: 4}"])
def test_a_policy_that_begins_with_a_bundle_reads_the_shards_of_the_bundle(tmp_path, lora):
    save_model(tmp_path / "model", "Llama")
    bundle = save_bundle(save_model(tmp_path / "other", "Llama", dtype=torch.bfloat16), tmp_path / "bundles")
    run = texts.config(
        f"team.speaker.model={{path: '{tmp_path / 'model'}', context: 32{lora}}}", f"team.speaker.bundle={bundle}"
    )
    policy = build_models(run, make_env(run.env), {"speaker": ["a"]})["speaker"]
    assert policy.unread is not None
    assert {weight.device.type for name, weight in policy.lm.named_parameters() if "lora_" not in name} == {"meta"}
    expected = load_bundle(bundle).policies["lm"].lm.state_dict()
    with process_group():
        shard(policy, init_device_mesh("cpu", (1,)), False)
    held = {bare_name(name): local(value) for name, value in policy.lm.state_dict().items() if "lora_" not in name}
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(held[name], value.float()), name
    assert policy.base == f"{bundle}/lm"


def test_a_bundle_of_another_shape_is_no_begin(tmp_path):
    save_model(tmp_path / "model", "Llama")
    shapes = {"wide": {"hidden_size": 64}, "deep": {"num_hidden_layers": 3}, "flat": {"num_hidden_layers": 1}}
    messages = ["model.embed_tokens.weight is [259, 64]", "model.layers.2.", "it lacks model.layers.1."]
    for (name, shape), message in zip(shapes.items(), messages, strict=True):
        bundle = save_bundle(save_model(tmp_path / name, "Llama", **shape), tmp_path / "bundles")
        run = texts.config(
            f"team.speaker.model={{path: '{tmp_path / 'model'}', context: 32}}", f"team.speaker.bundle={bundle}"
        )
        begin = f"team.speaker.bundle: holds a language model of another shape: {message}"
        with pytest.raises(MarlRayError, match=re.escape(begin)):
            build_models(run, make_env(run.env), {"speaker": ["a"]})


def save_bundle(folder, bundles):
    return save_token_bundle(bundles, {"a": "lm"}, {"lm": on_cpu(build_policy(folder, False))}, LINEAGE)


def test_a_disk_that_fails_while_weights_are_read_is_named(tmp_path, monkeypatch):
    policy = build_policy(save_model(tmp_path), True)

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    message = rf"^{tmp_path}/model\.safetensors: weight model\.\S+ cannot be read: Input/output error$"
    with pytest.raises(MarlRayError, match=message):
        on_cpu(policy)


def missing(folder, last):
    last.unlink()
    return f": {last.name}: No such file"


def truncate(folder, last):
    last.write_bytes(last.read_bytes()[:-10])
    return f": {last.name}: "


def of_another_model(folder, last):
    weights = load_file(last)
    name = max(weights, key=lambda key: weights[key].numel())
    shape = list(weights[name].shape)
    weights[name] = torch.zeros(shape[0], *[3 for _ in shape[1:]])
    save_file(weights, last, {"format": "pt"})
    return f": its weight {name} is {[shape[0], 3]}, expected {shape}"


def incomplete(folder, last):
    weights = load_file(last)
    name = min(weights)
    save_file({key: value for key, value in weights.items() if key != name}, last, {"format": "pt"})
    return f" lacks 1 weights of its model, such as {name}"


def under_other_names(folder, last):
    weights = load_file(last)
    save_file({f"other.{name}": value for name, value in weights.items()}, last, {"format": "pt"})
    return f" lacks {len(weights)} weights of its model, such as {min(weights)}"


def in_two_files(folder, last):
    first = min(folder.glob("*.safetensors"))
    name, value = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: value + 1}, last, {"format": "pt"})
    return f": the weight {name} is in {first.name} and in {last.name}, expected one"


def of_fewer_blocks(folder, last):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1}))
    return ": its config.json has no block for the weight model.layers.1.input_layernorm.weight"


def of_integers(folder, last):
    weights = load_file(last)
    name = min(weights)
    save_file(weights | {name: weights[name].to(torch.int8)}, last, {"format": "pt"})
    return f": its weight {name} is of type I8, expected one of F32, F16, BF16, F64"


def of_no_index(folder, last):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    return (
        ": model.safetensors.index.json: expected a JSON object with metadata, and with weight_map: weight to its file"
    )


SPOILED = [
    missing,
    truncate,
    of_another_model,
    incomplete,
    under_other_names,
    in_two_files,
    of_fewer_blocks,
    of_integers,
    of_no_index,
]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_file_that_cannot_be_read_is_named_before_a_cluster_is_asked(tmp_path, spoil):
    save_model(tmp_path, "Llama", shards="20KB")
    run = texts.config(f"team.speaker.model={{path: '{tmp_path}', context: 32}}")
    check_run(run)
    last = max(tmp_path.glob("*.safetensors"))
    message = f"team.speaker.model.path '{tmp_path}'{spoil(tmp_path, last)}"
    with pytest.raises(MarlRayError) as refused:
        check_run(run)
    assert message.removeprefix("team.speaker.") in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(MarlRayError) as also_refused:  # workers have no other opinion
        build_policy(tmp_path, True)
    assert message.partition(": ")[2] in str(also_refused.value)


def test_files_whose_weights_transformers_renames_are_of_their_model(tmp_path):
    save_model(tmp_path, "Mixtral", num_local_experts=2, intermediate_size=16)
    assert any(".experts.1." in name for name in load_file(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    check_files(str(tmp_path), lm)


W, B = ("w", torch.zeros(2)), ("b", torch.zeros(1))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([W], "expected b torch.float32 [1], got none"),
        ([B, W], "expected w torch.float32 [2], got b torch.float32 [1]"),
        ([("w", torch.zeros(3)), B], "expected w torch.float32 [2], got w torch.float32 [3]"),
        ([W, B, W], "there are more than were expected"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_not_written(weights, words, tmp_path):
    with pytest.raises(ValueError, match=f"^weights: {re.escape(words)}$"):
        write_model(tmp_path / "m", tiny().lm, dict([W, B]), iter(weights))
