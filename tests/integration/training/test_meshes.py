"""Workers that share one set of weights, and groups of them that have one each, do what one process does."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes.two_workers import workers
from safetensors.torch import load_file
from toy_models.small_llama import saved_llama
from toy_runs.runs import timeless
from toys import texts as toy_texts
from transformers import AutoConfig, AutoModelForCausalLM

from marl_ray.config.run.model import ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.training.run_checks import check_run
from marl_ray.training.single_process import process_group, train_alone

RUN = [
    "train.group_size=2",
    "hyper.minibatches=2",
    "hyper.kl_coef=0.1",
    "hyper.max_grad_norm=0.05",
    "train.micro_batch=3",
]
"""Three iterations of two updates, whose gradients are clipped."""
OFFLOAD = "team.speaker.model.cpu_offload=true"
MESHES = {
    "two groups of one": (2, "resources.parallel.replicate=2"),
    "offload": (2, OFFLOAD),
    "two groups of two": (4, "resources.parallel={shard: 2, replicate: 2}"),
    "four, offload": (4, OFFLOAD, "resources.parallel.shard=4"),
    "context": (2, "resources.parallel.context=2"),
    "tensor": (2, "resources.parallel.tensor=2"),
    "tensor, two groups": (4, "resources.parallel={replicate: 2, tensor: 2}"),
    "tensor, shards, offload": (4, OFFLOAD, "resources.parallel={shard: 2, tensor: 2}"),
    "tensor and context": (4, "resources.parallel={context: 2, tensor: 2}"),
}

SHORT = ("context", "tensor")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Overrides that let the speaker be a Llama of random weights, in a folder, whose heads 4 workers can share."""
    return saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Iterator[tuple[list, Path]]:
    folder = tmp_path_factory.mktemp("alone")
    with process_group():
        yield toy_texts.train_rows(str(folder), model, *RUN), folder


@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in MESHES]
)
def test_a_mesh_trains_the_same_as_one_process(model, alone, tmp_path, mesh):
    single, folder = alone
    count, *overrides = MESHES[mesh]
    several = workers(count, toy_texts.train_rows, str(tmp_path), model, *RUN, f"resources.workers={count}", *overrides)
    assert len(single) == len(several) == 3
    for first, other in zip(timeless(single), timeless(several), strict=True):
        assert other == pytest.approx(first, abs=1e-5)
    expected, got = weights(folder), weights(tmp_path)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0, msg=name)
    # One process continues from the checkpoint of several, which has each shard once.
    more = toy_texts.config(model, *RUN, "train.total_steps=32")
    expected_row, row = (timeless(train_alone(more, resume=place / "3"))[-1] for place in (folder, tmp_path))
    assert row == pytest.approx(expected_row, abs=1e-5)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last bundle."""
    last = max(folder.glob("*/bundle"), key=lambda bundle: int(bundle.parent.name))
    (path,) = last.rglob("*.safetensors")
    return load_file(path)


@pytest.mark.long
def test_workers_that_compute_passes_together_go_on_from_the_checkpoint_of_one(model, alone):
    single, folder = alone
    mesh = ["resources.workers=4", "resources.parallel={shard: 2, tensor: 2}"]
    several = workers(4, toy_texts.resume_rows, str(folder / "2"), model, *RUN, *mesh)
    assert timeless(several)[-1] == pytest.approx(timeless(single)[-1], abs=1e-5)


@pytest.mark.parametrize(
    ("parallel", "architecture", "message"),
    [
        ({"tensor": 2}, None, "tensor=2, team.speaker.model: expected a divisor of its 3 attention heads"),
        ({"context": 2}, None, "context=2, team.speaker.model: expected a divisor of its 3 attention heads"),
        ({"tensor": 4}, "Llama", "tensor=4, team.speaker.model: expected a divisor of its 2 heads of keys"),
        (
            {"tensor": 2, "context": 4},
            "Llama",
            "context=4, team.speaker.model: expected a divisor of its 2 attention heads that each worker has of every layer",
        ),
        (
            {"tensor": 2},
            "GPT2",
            "tensor=2, team.speaker.model: transformers has no tensor-parallel plan for ",
        ),
        ({"tensor": 2}, "Qwen3", "tensor=2, team.speaker.model: the plan of architecture qwen3 has layers of kind "),
        (
            {"tensor": 2},
            "Phi",
            "tensor=2, team.speaker.model: expected no weight layers.0.self_attn.q_layernorm.weight beside the layers",
        ),
        ({"context": 2}, "GPT2", "context=2, team.speaker.model: expected one of LlamaForCausalLM, "),
    ],
)
def test_workers_that_cannot_compute_passes_together_are_named_before_a_run(tmp_path, parallel, architecture, message):
    speaker = {"preset": "tiny-0.2m", "context": 32}
    if architecture is not None:
        tokenizer = byte_tokenizer(32)
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
        more = {} if architecture == "GPT2" else {"num_key_value_heads": 2, "intermediate_size": 32}
        more |= {"qk_layernorm": True} if architecture == "Phi" else {}
        shape = AutoConfig.for_model(architecture.lower(), max_position_embeddings=32, **sizes, **more)
        AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        speaker = {"path": str(tmp_path), "context": 32}
    resources = {"workers": 8, "parallel": parallel}
    run = toy_texts.config("train.env_copies=32", f"resources={json.dumps(resources)}")
    team = {"speaker": run.team["speaker"].model_copy(update={"model": ModelConfig.model_validate(speaker)})}
    with pytest.raises(MarlRayError, match=rf"^resources.parallel.{re.escape(message)}"):
        check_run(run.model_copy(update={"team": team}))


@pytest.mark.long
def test_with_a_learned_entropy_and_a_critic_parts_of_layers_differ_by_rounding_alone(model, tmp_path):
    """Adam enlarges the rounding of gradients near zero.

    With the default eps of 1e-5 it does so by up to lr / eps = 100, to 1e-6 of a weight and more; here by up to 10. By
    SGD the weights differ by less than 1e-10.
    """
    ppo = [model, *(key for key in RUN if "kl_coef" not in key), "algorithm=ppo", "hyper.entropy_coef=0.01"]
    ppo.append("hyper.adam_eps=1e-4")
    with process_group():
        single = toy_texts.train_rows(str(tmp_path / "alone"), *ppo)
    parted = ["resources.workers=2", "resources.parallel.tensor=2"]
    several = workers(2, toy_texts.train_rows, str(tmp_path / "tensor"), *ppo, *parted)
    for first, other in zip(timeless(single), timeless(several), strict=True):
        assert other == pytest.approx(first, abs=1e-5)
    expected, got = weights(tmp_path / "alone"), weights(tmp_path / "tensor")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0, msg=name)
