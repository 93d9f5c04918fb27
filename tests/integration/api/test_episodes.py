"""Whole episodes of a bundle, as `marl_ray.evaluate` plays them without a benchmark."""

import json
from pathlib import Path

import pytest
from gymnasium import spaces
from processes.command_line import keys_of
from processes.command_line import marl_ray as command_line
from toy_runs.runs import config
from toys.envs import countdown

import marl_ray
from marl_ray.config import NetworkConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.distributions import distribution_of
from marl_ray.policies.actor_critic.networks import Network
from marl_ray.policies.bundles.actor_critic import ServedPolicy
from marl_ray.training.single_process import train_alone
from marl_ray.training.team.families.actor_critic_teams import explain_mismatch


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_alone(config(f"storage={folder}"), folder)
    return next(folder.rglob("bundle.json")).parent


def test_a_bundle_is_scored_on_whole_episodes_of_its_environment(bundle):
    scores = marl_ray.evaluate(policy=bundle, episodes=8)
    assert len(scores.returns) == len(scores.lengths) == 8 and scores.truncated == 0
    assert scores.score == pytest.approx(sum(scores.returns) / 8)
    low, high = scores.interval or (0.0, 0.0)
    assert low <= scores.score <= high and str(scores).startswith("score ")
    assert marl_ray.evaluate(policy=bundle, episodes=8) == scores  # the same starts and draws
    assert marl_ray.evaluate(policy=bundle, episodes=1).interval is None
    assert marl_ray.evaluate(policy=bundle, episodes=4, max_steps=1).truncated == 4


def test_the_command_line_plays_the_same_episodes(bundle):
    scores = marl_ray.evaluate(policy=bundle, episodes=8)
    command = ("evaluate", "--policy", str(bundle), "--episodes", "8")
    assert command_line(*command).stdout.strip() == str(scores)
    document = json.loads(command_line(*command, "--json").stdout)
    assert set(document) == {"score", "interval", "returns", "lengths", "truncated"} <= keys_of("evaluate")
    assert document["returns"] == scores.returns and document["score"] == scores.score
    refusal = command_line(*command, "--benchmark", "math").stderr
    assert refusal.strip() == "marl-ray: --benchmark: expected none beside `episodes`"
    refusal = command_line(*command, "--k", "1").stderr
    assert refusal.strip() == "marl-ray: --k: expected none beside `episodes`"
    refusal = command_line("evaluate", "--policy", str(bundle)).stderr
    assert "--benchmark: expected a benchmark's name; --episodes N plays" in refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "benchmark: expected a benchmark's name, or `episodes`"),
        ({"episodes": 0}, "episodes: expected a whole number of 1 or more, got 0"),
        ({"episodes": True}, "episodes: expected a whole number of 1 or more, got True"),
        ({"episodes": (1 << 20) + 1}, "episodes: expected a whole number of at most 1048576, got 1048577"),
        ({"episodes": 3, "gredy": True}, r"gredy: is unknown; did you mean greedy\?"),
        ({"episodes": 3, "k": [1]}, "k: expected none beside `episodes`"),
        ({"episodes": 3, "min_level": "namespaces"}, "min_level: expected none beside `episodes`"),
        ({"episodes": 3, "progress": print}, "progress: expected none beside `episodes`"),
        (
            {"episodes": 3, "env": {"length": 9}},
            r"^policy: /.*: a's observations are MultiDiscrete\(\[10 +2\].*, the bundle's MultiDiscrete\(\[7 2\]",
        ),
        ({"episodes": 3, "env": {"floats": True}}, r"^policy: /.*: a's observations are Box"),
        ({"episodes": 3, "env": {"lenght": 3}}, r"env.kwargs.lenght: toys.envs:countdown has no such argument"),
    ],
)
def test_a_wrong_argument_is_named(bundle, arguments, message):
    with pytest.raises(MarlRayError, match=message):
        marl_ray.evaluate(policy=bundle, **arguments)


@pytest.mark.parametrize(
    ("seen", "actions", "message"),
    [
        (spaces.Box(0, 1, (6,)), spaces.Discrete(2), "a's observations have shape [2], the bundle's [6]"),
        (spaces.Box(0, 1, (2,)), spaces.Discrete(3), "a's actions are Discrete(2), the bundle's Discrete(3)"),
        (spaces.Box(0, 1, (2,)), spaces.Discrete(2), "a's network has other layers than the bundle's; expected the"),
    ],
)
def test_a_bundle_whose_weights_do_not_fit_is_told_what_differs(seen, actions, message):
    distribution = distribution_of(actions)
    trained = ServedPolicy(seen, actions, distribution, Network(seen, NetworkConfig(), distribution.parameters, 1.0))
    assert explain_mismatch(countdown(floats=True), "a", trained).startswith(message)
