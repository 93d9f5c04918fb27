"""Several workers read a model from files: the same numbers, the same refusal, and no model that is whole on a worker."""

from pathlib import Path

import pytest
import torch
from processes.two_workers import two_workers, workers
from toy_models.stored import loading_peaks, peaks, read_alike, refuse_together
from toy_models.tokens import LORA, responses, tiny
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from marl_ray.policies.language.sharding.gather_shards import MAX_GATHERED_BYTES
from marl_ray.policies.language.tiny_models import byte_tokenizer

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 257,
}
"""A model of 134.5 million weights (the sizes of SmolLM2-135M)."""


def save_model(folder: Path, shards: str = "10GB") -> str:
    tiny().lm.save_pretrained(folder, max_shard_size=shards)
    byte_tokenizer(64).save_pretrained(folder)
    return str(folder)


def test_two_workers_read_their_shards_alone(tmp_path):
    two_workers(read_alike, save_model(tmp_path), [{}, {"lora": LORA, "dtype": "bf16"}], responses())


def test_groups_of_workers_read_the_shards_of_their_own_mesh(tmp_path):
    workers(4, read_alike, save_model(tmp_path), [{}], responses(), 2)


def test_a_broken_file_of_one_worker_is_every_workers_error(tmp_path):
    folders = [save_model(tmp_path / name, "100KB") for name in ("sound", "broken")]
    last = max(Path(folders[1]).glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-10])
    message = two_workers(refuse_together, folders)
    assert message.startswith(f"worker 1: model.path '{folders[1]}' is no causal language model: {last.name}: ")
    assert "\n" not in message


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with torch.device("meta"):
        lm = LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()
    lm = lm.to_empty(device="cpu")
    lm.tie_weights()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    lm.save_pretrained(folder, max_shard_size="100MB")
    byte_tokenizer(1024).save_pretrained(folder)
    sizes = [4 * sum(weight.numel() for weight in part.parameters()) for part in (lm, lm.model.layers[0])]
    return str(folder), *sizes


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_worker_holds_its_share_of_the_trained_weights_and_one_layer(stored, count):
    folder, model, layer = stored
    with_copy = max(workers(count, peaks, folder, True, True))
    alone = max(workers(count, peaks, folder, True, False))
    at_once = max(workers(count, peaks, folder, False, True))
    print(f"{count} workers: {alone / model:.2f}, {with_copy / model:.2f}, {at_once / model:.2f} times the model")
    assert alone <= 1.2 / count * model + layer
    assert with_copy <= model + 1.2 / count * model + layer
    assert at_once > 1.9 * model


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_beside_an_engine_a_worker_holds_at_most_its_share_and_one_weight(stored, count, tmp_path):
    folder, model, layer = stored
    stage_peaks = {name: max(each) for name, each in workers(count, loading_peaks, folder, str(tmp_path)).items()}
    largest = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    shares = ", ".join(f"{name} {peak / model:.2f}" for name, peak in stage_peaks.items())
    print(f"{count} workers: {shares} times the model")
    assert stage_peaks["load"] <= 1.2 / count * model + layer
    # Besides the shards: the largest weight, or AT_ONCE of smaller ones, as it was sent, as it arrives, and put together.
    assert max(stage_peaks["hand over"], stage_peaks["write"]) <= 3 * max(largest, MAX_GATHERED_BYTES)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    models = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (folder, tmp_path))
    for (name, first), other in zip(next(models).state_dict().items(), next(models).state_dict().values(), strict=True):
        assert torch.equal(first, other), name
