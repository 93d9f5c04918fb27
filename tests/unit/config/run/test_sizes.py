"""The numbers of a run: the largest that there is room for, and those that divide or fit each other."""

import pytest
from toy_runs.run_configs import refusal, run


@pytest.mark.parametrize(
    ("key", "max_value"),
    [
        ("seed", (1 << 53) - 1),
        ("hyper.epochs", 1 << 26),
        ("hyper.dynamic_sampling", 127),
        ("train.env_copies", 1 << 20),
        ("evaluation.episodes", 1 << 20),
        ("evaluation.max_steps", 1 << 26),
    ],
)
def test_a_number_that_no_random_stream_has_bits_for_is_refused(key, max_value):
    overrides = ["algorithm=dapo", "train.group_size=4"]
    run(*overrides, f"{key}={max_value}")
    assert refusal(*overrides, f"{key}={max_value + 1}") == (
        f"config: {key}: expected a number of at most {max_value}, got {max_value + 1}"
    )


def test_env_copies_divide_among_workers():
    assert run("train.env_copies=6", "resources.workers=3").batch_steps == 6 * 64
    assert "train.env_copies=6 must be a multiple of resources.workers=4" in refusal(
        "train.env_copies=6", "resources.workers=4"
    )


LANGUAGE = {
    "algorithm": "grpo",
    "env": {"id": "math"},
    "team": {"a": {"model": {"preset": "tiny-0.2m"}}},
    "train": {"group_size": 4, "env_copies": 64, "horizon": 1},
}


def test_groups_of_workers_divide_the_workers():
    for parallel, groups in (
        ({}, 1),
        ({"replicate": 2}, 2),
        ({"shard": 2, "replicate": 2}, 2),
        ({"shard": 1}, 4),
        ({"tensor": 2}, 1),
        ({"shard": 1, "tensor": 2}, 2),
        ({"shard": 1, "context": 2, "tensor": 2}, 1),
    ):
        assert run(resources={"workers": 4, "parallel": parallel}, **LANGUAGE).resources.replicate == groups
    for parallel, message in (
        ({"replicate": 3}, "parallel.replicate=3: expected a divisor of resources.workers=4"),
        ({"shard": 8}, "parallel.shard=8: expected a divisor of resources.workers=4"),
        ({"shard": 4, "replicate": 2}, "shard=4 x replicate=2, expected their product to be resources.workers=4"),
        (
            {"shard": 4, "tensor": 2},
            "shard=4 x tensor=2, expected their product to be a divisor of resources.workers=4",
        ),
        ({"shard": 1, "replicate": 2}, "shard=1 x replicate=2, expected their product to be resources.workers=4"),
        ({"pipeline": 2}, "resources.parallel.pipeline"),
    ):
        assert message in refusal(resources={"workers": 4, "parallel": parallel}, **LANGUAGE)
    message = "resources.parallel: 2 groups of workers, expected language models"
    offloaded = LANGUAGE | {"team": {"a": {"model": {"preset": "tiny-0.2m", "cpu_offload": True}}}}
    assert "team.a.model.cpu_offload: expected one group of workers, got 2 by resources.parallel" in refusal(
        resources={"workers": 4, "parallel": {"shard": 2}}, **offloaded
    )
    assert message in refusal("resources.workers=4", "resources.parallel.replicate=2")
    for key in ("tensor", "context"):
        together = f"resources.parallel.{key}=2: expected language models"
        assert together in refusal("resources.workers=4", f"resources.parallel.{key}=2")
    adapted = LANGUAGE | {"team": {"a": {"model": {"preset": "tiny-0.2m", "lora": {"rank": 2}}}}}
    assert "team.a.model.lora: expected no adapters with resources.parallel.tensor=2" in refusal(
        resources={"workers": 4, "parallel": {"tensor": 2}}, **adapted
    )


def test_minibatches_fit_the_horizon():
    message = "minibatches=9 of policy 'a' must not exceed train.horizon=8"
    assert message in refusal("train.horizon=8", team={"a": {"hyper": {"minibatches": 9}}})
