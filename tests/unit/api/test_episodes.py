"""Whole episodes of a bundle, as `marl_ray.evaluate` plays them without a benchmark."""

from pathlib import Path

import pytest
from toy_runs.runs import config

import marl_ray
from marl_ray.errors import MarlRayError
from marl_ray.training.single_process import train_alone


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_alone(config(f"storage={folder}"), folder)
    return next(folder.rglob("bundle.json")).parent


def test_a_bundle_is_scored_on_whole_episodes_of_its_environment(bundle: Path):
    scores = marl_ray.evaluate(policy=bundle, episodes=8)
    assert len(scores.returns) == len(scores.lengths) == 8 and scores.cut == 0
    assert scores.score == pytest.approx(sum(scores.returns) / 8)
    low, high = scores.interval or (0.0, 0.0)
    assert low <= scores.score <= high and str(scores).startswith("score ")
    assert marl_ray.evaluate(policy=bundle, episodes=8) == scores  # the same starts and draws
    assert marl_ray.evaluate(policy=bundle, episodes=1).interval is None
    assert marl_ray.evaluate(policy=bundle, episodes=4, max_steps=1).cut == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "benchmark: expected a benchmark's name, or `episodes`"),
        ({"episodes": 0}, "episodes: expected a whole number of 1 or more, got 0"),
        ({"episodes": (1 << 20) + 1}, "episodes: expected a whole number of at most 1048576, got 1048577"),
        ({"episodes": 3, "gredy": True}, r"gredy: is unknown; did you mean greedy\?"),
        ({"episodes": 3, "k": [1]}, "k: expected none beside `episodes`"),
        ({"episodes": 3, "min_level": "namespaces"}, "min_level: expected none beside `episodes`"),
        ({"episodes": 3, "progress": print}, "progress: expected none beside `episodes`"),
        ({"episodes": 3, "env": {"lenght": 3}}, r"env.kwargs.lenght: toys.envs:countdown has no such argument"),
    ],
)
def test_a_wrong_argument_is_named(bundle: Path, arguments, message: str):
    with pytest.raises(MarlRayError, match=message):
        marl_ray.evaluate(policy=bundle, **arguments)
