"""A step whose tensors have no numbers takes the memory that a real one of that shape must take."""

from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from toy_models.small_llama import saved_llama
from toys import texts
from transformers import LlamaConfig

from marl_ray.config import RunConfig, load_config, parse_config
from marl_ray.config.run.model import LoraConfig, ModelConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language.model_files import empty_lm
from marl_ray.training.team.dry_step import DryPass, dry_step
from marl_ray.training.team.memory_plan import memory_plan, sampling_bytes, weight_shards
from marl_ray.training.team.model_shapes import qwen_architecture, read_architecture

CONFIGS = Path(__file__).parents[4] / "jobs" / "configs"
GIB = 1 << 30
LENGTH = 64
TINY = LlamaConfig(
    vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, eos_token_id=257
)
TINY_PRESET = read_architecture(ModelConfig(preset="tiny-0.2m", context=32))
TINY_WEIGHTS = 2 * 259 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def model(**more):
    return ModelConfig.model_validate({"preset": "tiny-1m", "context": LENGTH, "activation_checkpointing": True} | more)


@cache
def tiny_step(workers, rows):
    """The peak of a step of the small model; several tests look at the same one."""
    return dry_step(TINY, model(), workers, DryPass(rows, 8))


def numbers(shape):
    return sum(parameter.numel() for parameter in empty_lm(shape).parameters())


def run_of(**keys):
    team = {"speaker": {"model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", **keys}, "generation": {"max_tokens": 8}}}
    data = {"name": "plan", "algorithm": "grpo", "env": {"id": "math"}, "team": team}
    return parse_config(RunConfig, data | {"train": {"group_size": 4, "env_copies": 8, "horizon": 1}})


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_share_weights_gradients_and_moments(workers):
    peak = tiny_step(workers, 2)
    share = 4 * TINY_WEIGHTS / workers
    assert peak.weights == pytest.approx(share, rel=0.02) == peak.gradients
    assert peak.optimizer == pytest.approx(2 * share, rel=0.02)
    assert peak.total == sum(peak)


@pytest.mark.long
def test_workers_that_compute_passes_together_hold_less_of_a_pass():
    four = LlamaConfig(
        **TINY.to_dict() | {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 1024}
    )
    plain, tensor, context = (dry_step(four, model(), 4, DryPass(8, 8), axes=axes) for axes in ((1, 1), (1, 2), (2, 1)))
    assert tensor.weights == pytest.approx(plain.weights, rel=0.01) and context.weights == plain.weights
    assert tensor.gathered < 0.6 * plain.gathered  # of a block that is gathered, which is most of it
    assert context.activations < 0.75 * plain.activations


def test_tied_weights_count_once():
    tied = LlamaConfig(**TINY.to_dict() | {"tie_word_embeddings": True})
    peak = dry_step(tied, model(), 2, DryPass(2, 8))
    assert peak.weights == pytest.approx(4 * (TINY_WEIGHTS - 259 * 64) / 2, rel=0.02) == peak.gradients


def test_activations_grow_with_the_rows_of_a_pass():
    peaks = [tiny_step(4, rows) for rows in (1, 2, 3)]
    first, second, third = (peak.activations for peak in peaks)
    assert third - second == pytest.approx(second - first, rel=0.02) and second > 1.5 * first


def test_adapters_leave_gradients_and_moments_to_themselves():
    peak = dry_step(TINY, model(lora=LoraConfig(rank=4)), 2, DryPass(2, 8))
    adapters = 2 * 4 * 4 * (64 + 64) + 2 * 4 * 3 * (64 + 128)
    assert peak.gradients == pytest.approx(4 * adapters / 2, rel=0.05)
    assert peak.weights == pytest.approx((2 * TINY_WEIGHTS + 4 * adapters) / 2, rel=0.05)


@pytest.mark.parametrize(("size", "weights"), [("0.5b", 0.494e9), ("3b", 3.086e9), ("7b", 7.616e9), ("72b", 72.7e9)])
def test_shapes_have_as_many_weights_as_their_pages_say(size, weights):
    assert numbers(qwen_architecture(size)) == pytest.approx(weights, rel=0.002)


def test_a_model_is_known_by_its_name_or_its_folder(tmp_path):
    named = read_architecture(ModelConfig(path="Qwen/Qwen2.5-Coder-7B-Instruct"))
    named.save_pretrained(tmp_path)
    assert read_architecture(ModelConfig(path=str(tmp_path))).hidden_size == named.hidden_size == 3584
    with pytest.raises(MarlRayError, match=r"^model.path '.*/none' has no config.json of a language model: .*$"):
        read_architecture(ModelConfig(path=str(tmp_path / "none")))


@pytest.mark.slow
def test_a_plan_adds_what_the_step_does_not_hold():
    plain, offloaded = memory_plan(run_of(), 2), memory_plan(run_of(cpu_offload=True), 2)
    weights = 0.494e9
    assert plain.sampling == offloaded.sampling == pytest.approx(2 * weights, rel=0.01)
    assert plain.resting == pytest.approx((16 / 2 + 2) * weights, rel=0.01)
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (0, 0, 0)
    assert offloaded.resting == offloaded.sampling
    assert offloaded.main_memory == pytest.approx(16 / 2 * weights, rel=0.01)
    assert plain.main_memory == 0 and offloaded.total < plain.total


ELSEWHERE = "toys.engines:Apart"


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ([f"team.speaker.generation.engine={ELSEWHERE}"], 0),
        ([f"team.speaker.generation.engine={ELSEWHERE}", "team.speaker.bundle=there"], 0),
        (["team.speaker.generation.engine=torch"], 1),
        (["team.speaker.generation.engine=transformers"], 1),
        (["team.speaker.generation={engine: vllm, max_tokens: 4}"], 0),
        (["team.speaker.generation={engine: vllm, max_tokens: 4, top_p: 0.9, temperature: 1.0}"], 0),
        (["team.speaker.generation={engine: vllm, max_tokens: 4, top_p: 0.9, temperature: 0.7}"], 1),
        ([f"team.speaker.generation.engine={ELSEWHERE}", "team.speaker.model={preset: tiny-0.2m, context: 32}"], 1),
        ([f"team.speaker.generation.engine={ELSEWHERE}", "data=pairs.jsonl", "algorithm=dpo", "train.group_size=1"], 1),
    ],
)
def test_a_plan_counts_the_copies_that_sample_on_workers(tmp_path, overrides, copies):
    assert sampling_bytes(texts.config(saved_llama(tmp_path), *overrides), "speaker") == 2 * copies


def test_a_plan_adds_the_copy_that_samples(tmp_path):
    held = numbers(TINY_PRESET)
    assert memory_plan(texts.config(), 2).sampling == 2 * held


def test_a_plan_counts_the_copy_of_a_model_whose_files_must_be_converted(tmp_path):
    llama = saved_llama(tmp_path)
    run = texts.config(llama, f"team.speaker.generation.engine={ELSEWHERE}")
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): value for name, value in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert memory_plan(run, 2).sampling == 2 * numbers(read_architecture(ModelConfig(path=str(tmp_path))))


@pytest.mark.parametrize(
    ("parallel", "shards"),
    [
        ({}, 16),
        ({"replicate": 4}, 4),
        ({"shard": 2, "replicate": 2}, 2),
        ({"shard": 1, "tensor": 2, "context": 2}, 4),
        ({"tensor": 4}, 16),
    ],
)
def test_groups_share_their_weights_among_themselves(parallel, shards):
    run = run_of()
    need = run.resources.model_validate({"workers": 4, "parallel": parallel})
    assert weight_shards(run.model_copy(update={"resources": need}), 16) == shards


def test_groups_must_divide_the_gpus():
    need = run_of().resources.model_validate({"workers": 4, "parallel": {"replicate": 4}})
    with pytest.raises(MarlRayError, match=r"^resources.parallel.replicate=4: expected a divisor of the 6 GPUs$"):
        memory_plan(run_of().model_copy(update={"resources": need}), 6)
    need = run_of().resources.model_validate({"workers": 8, "parallel": {"shard": 2, "tensor": 4}})
    message = r"^resources.parallel: shard=2 x tensor=4, expected their product to be a divisor of the 4 GPUs$"
    with pytest.raises(MarlRayError, match=message):
        memory_plan(run_of().model_copy(update={"resources": need}), 4)


def test_a_plan_takes_a_folder_with_more_tokens_than_the_planning_tokenizer(tmp_path):
    """The config of every large model does."""
    LlamaConfig(**TINY.to_dict() | {"vocab_size": 1024, "eos_token_id": 1000}).save_pretrained(tmp_path)
    assert memory_plan(run_of(path=str(tmp_path), context=32), 2).weights > 0


def test_a_plan_counts_no_moments_of_plain_gradient_descent(tmp_path):
    plan = memory_plan(texts.config(saved_llama(tmp_path), "hyper.optimizer=sgd"), 2)
    assert plan.optimizer == 0 and plan.gradients == plan.weights > 0


def test_a_plan_refuses_a_mesh_that_does_not_divide_the_model(tmp_path):
    run = texts.config(saved_llama(tmp_path), "train.env_copies=16", "resources={workers: 4, parallel: {tensor: 4}}")
    message = "^resources.parallel.tensor=4, team.speaker.model: expected a divisor of its 2 heads of keys$"
    with pytest.raises(MarlRayError, match=message):
        memory_plan(run, 4)


def test_actor_critics_have_no_plan():
    with pytest.raises(MarlRayError, match=r"^team: expected language models"):
        memory_plan(load_config(RunConfig, CONFIGS / "multigrid_ippo.yaml"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "memory"), [("qwen_coder_team", 8, 80e9), ("qwen_react", 4, 24e9)], ids=["7B", "3B"]
)
def test_the_recipes_fit_on_their_gpus(name, gpus, memory):
    plan = memory_plan(load_config(RunConfig, CONFIGS / f"{name}.yaml"), gpus)
    print(f"{name}: {plan.total / GIB:.1f} GiB, {plan.resting / GIB:.1f} at rest")
    assert plan.total < 0.85 * memory  # the rest is for fragmentation and CUDA
    assert plan.resting < 0.5 * memory  # vLLM takes half while the team plays
