"""Two workers, without Ray, do what one does."""

import json
import re

import pytest
import torch
from processes.two_workers import two_workers, workers
from toy_models.tokens import LORA, of_joint_workers, of_two_shards
from toy_runs.runs import BRIEF, PLAYING, of_two, short, timeless, weights
from toy_runs.short_memory import fail_to_update
from toy_serving.logged_texts import served_row, write_served
from toys import texts as toy_texts
from toys.texts import TWO_AGENTS, TWO_POLICIES

from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.training.single_process import train_alone

WORKERS = {
    "grpo": ["hyper.minibatches=2", "hyper.epochs=2", "hyper.kl_coef=0.1", "train.micro_batch=3", TWO_AGENTS],
    "dapo": ["algorithm=dapo", TWO_AGENTS, TWO_POLICIES, "train.curriculum=easiest_first"],
    "p3o": ["algorithm=p3o", "constraints=[{budget: 2}]", "env={id: 'toys.texts:echo', kwargs: {cost: [tokens]}}"],
    "sgd": ["hyper.optimizer=sgd", "hyper.weight_decay=0.1", "hyper.lr_warmup=3", "hyper.lr=0.1"],
    "tuned": ["warm_start={data: environment, count: 9, batch: 4, epochs: 2}", "evaluation.every=2"],
}


@pytest.mark.long
def test_actor_critics_train_the_same_as_on_one(alone, tmp_path):
    """With every algorithm. The group exchanges no tensor of the CPU, as NCCL does not."""
    double = two_workers(of_two, str(tmp_path / "two"), PLAYING, cpu=False)
    for name in PLAYING:
        single = train_alone(short(name, BRIEF), tmp_path / "one" / name)
        for a, b in zip(timeless(single), timeless(double[name]), strict=True):
            assert a == pytest.approx(b, abs=1e-5), name
        best = max(path.parent for path in (tmp_path / "one" / name).glob("*/bundle"))
        expected, got = (weights(tmp_path / number / name / best.name) for number in ("one", "two"))
        for key, value in expected.items():
            # Adam divides by a gradient's size: rounding of a small one moves its weight by a thousandth of the rate.
            torch.testing.assert_close(got[key], value, atol=2e-5, rtol=1e-4, msg=f"{name}: {key}")


def test_language_models_train_the_same_as_on_one(alone):
    """With rows that differ in number between the workers, minibatches, several policies, and refilled groups."""
    double = two_workers(toy_texts.of_two, WORKERS)
    for name, more in WORKERS.items():
        single = train_alone(toy_texts.config(*more))
        for a, b in zip(timeless(single), timeless(double[name]), strict=True):
            assert a == pytest.approx(b, abs=1e-4), name


@pytest.mark.long
def test_language_models_learn_the_same_from_data_as_on_one(alone, tmp_path):
    """With pairs and with responses that were served, of which the workers have different numbers."""
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": "ab"[k % 2], "chosen": "x" * (1 + k % 3), "rejected": "y"} for k in range(9)]
    pairs.write_text("\n".join(json.dumps(line) for line in lines))
    tokenizer, generation = byte_tokenizer(32), GenerationConfig(max_tokens=4)
    rows = [
        served_row(
            f"u{k}", [97 + k % 3], [98 + k] * (1 + k % 4), [-5.0] * (1 + k % 4), k % 2, tokenizer, generation, agent="a"
        )
        for k in range(23)
    ]
    write_served(tmp_path / "e.parquet", rows)
    size = ["train.group_size=1", "train.env_copies=6", "train.total_steps=18", "hyper.minibatches=2", "hyper.epochs=2"]
    served = [f"data=decisions://{tmp_path}/e", "hyper.kl_coef=0.1", *size]
    runs = {
        "dpo": ["algorithm=dpo", f"data={pairs}", "train.micro_batch=3", *size],
        "grpo": served,
        "reinforce_pp": ["algorithm=reinforce_pp", *served],
        "offload": ["team.speaker.model.cpu_offload=true", *served],
    }
    double = two_workers(toy_texts.of_two, runs, cpu=False)
    for name, more in runs.items():
        single = train_alone(toy_texts.config(*more))
        for a, b in zip(timeless(single), timeless(double[name]), strict=True):
            assert a == pytest.approx(b, abs=1e-4), name


def test_language_models_are_sharded_as_one_holds_them():
    two_workers(of_two_shards)


@pytest.mark.parametrize(
    ("context", "tensor", "model", "biased"),
    [
        (2, 1, {}, False),
        (1, 2, {"activation_checkpointing": True}, True),
        (4, 1, {"lora": LORA}, False),
        pytest.param(2, 2, {}, False, marks=pytest.mark.long),
    ],
    ids=["context", "tensor, biases", "context, adapters, repeated heads", "both"],
)
def test_workers_that_compute_passes_together_score_as_one(context, tensor, model, biased):
    workers(context * tensor, of_joint_workers, context, tensor, model, biased)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_pass_without_memory_is_named_and_ends_the_other_worker(alone, passes):
    where = "policy 'speaker', iteration 1, step 0"
    assert fail_to_update(passes, 0).startswith(
        f"{where}: out of memory in a pass of 2 sequences; expected a smaller train.micro_batch, "
    )
    assert re.search("Connection (closed|reset)", two_workers(fail_to_update, passes, 1))


def test_ratios_in_bfloat16_are_one_whatever_a_worker_has(tmp_path):
    bfloat16 = ["algorithm=gspo", "resources.mixed_precision=bf16", "team.speaker.model.dtype=bf16"]
    still = ["hyper.lr=1e-30", "hyper.minibatches=3", "train.micro_batch=2", "resources.workers=2"]
    rows = two_workers(toy_texts.train_rows, str(tmp_path), *bfloat16, *still)
    assert {(row["clip_fraction"], row["kl"]) for row in rows if "kl" in row} == {(0.0, 0.0)}
