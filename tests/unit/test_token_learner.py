"""Language models learn the same however a batch is cut up, and go on bit for bit. No Ray."""

import json
from collections.abc import Iterator

import pytest
from toy_texts import TWO_AGENTS, TWO_POLICIES, config, of_two
from two_workers import two_workers

from marl_ray.config import SPECS, GenerationConfig, ModelConfig
from marl_ray.policies.token_policy import build_token_policy
from marl_ray.training.alone import process_group, train_alone
from marl_ray.training.memory import rehearse, rows_that_fit

LANGUAGE = [name for name, spec in SPECS.items() if spec.token_policies and spec.critic != "central"]
WORKERS = {
    "grpo": ["hyper.minibatches=2", "hyper.epochs=2", "hyper.kl_coef=0.1", "train.micro_batch=3", TWO_AGENTS],
    "dapo": ["algorithm=dapo", TWO_AGENTS, TWO_POLICIES, "train.curriculum=easiest_first"],
    "p3o": ["algorithm=p3o", "constraints=[{budget: 2}]", "env={id: 'toy_texts:echo', kwargs: {cost: [tokens]}}"],
    "tuned": ["warm_start={data: environment, count: 9, batch: 4, epochs: 2}", "evaluation.every=2"],
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "steps_per", "tokens_per"))} for row in rows]


def needed(algorithm: str) -> list[str]:
    costs = ["constraints=[{budget: 2}]", "env={id: 'toy_texts:echo', kwargs: {cost: [tokens]}}"]
    return [f"algorithm={algorithm}", *(costs if SPECS[algorithm].costs else [])]


@pytest.mark.parametrize("algorithm", LANGUAGE)
def test_micro_batches_change_nothing(algorithm):
    brief = [*needed(algorithm), "train.total_steps=16", "hyper.kl_coef=0.1", "hyper.minibatches=2"]
    whole = train_alone(config(*brief))
    parts = train_alone(config(*brief, "train.micro_batch=1"))
    assert whole[-1]["grad_norm"] > 0
    for a, b in zip(timeless(whole), timeless(parts), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "pid_lagrangian"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, algorithm):
    more = [*needed(algorithm), "train.curriculum=easiest_first", "hyper.kl_coef=0.1", "hyper.kl_target=0.01"]
    whole = train_alone(config(*more), tmp_path / "whole")
    resumed = train_alone(config(*more), tmp_path / "again", tmp_path / "whole" / "1")
    assert timeless(whole)[1:] == timeless(resumed)
    states = [json.loads((tmp_path / name / "3" / "state.json").read_text()) for name in ("whole", "again")]
    for state in states:
        state["metrics"] = timeless([state["metrics"]])
    assert states[0] == states[1]


def test_two_workers_train_the_same_as_one(tmp_path):
    """With rows that differ in number between the workers, minibatches, several policies, and refilled groups."""
    double = two_workers(of_two, str(tmp_path / "two"), WORKERS)
    for name, more in WORKERS.items():
        single = train_alone(config(*more), tmp_path / "one" / name)
        for a, b in zip(timeless(single), timeless(double[name]), strict=True):
            assert a == pytest.approx(b, abs=1e-4), name


@pytest.mark.parametrize(
    ("one", "two", "free", "rows"), [(3, 5, 11, 5), (3, 5, 12.9, 5), (3, 5, 3, 1), (9, 12, 5, 1), (4, 4, 7, 4)]
)
def test_passes_take_as_many_rows_as_fit(one, two, free, rows):
    assert rows_that_fit(one, two, free) == rows


def test_a_rehearsed_pass_leaves_nothing_behind():
    policy = build_token_policy(ModelConfig(preset="tiny-0.2m", context=16), GenerationConfig(max_tokens=4), 0, True, 1)
    rehearse(policy, 2)
    assert all(parameter.grad is None for parameter in policy.parameters())
