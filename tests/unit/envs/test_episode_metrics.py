"""The numbers that an environment reports of its episodes, as `infos[agent]["metrics"]`."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toys.envs import Countdown

from marl_ray.config.run.sections import EnvConfig
from marl_ray.conformance.extensions.environment import check
from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.batch import EpisodeMetrics
from marl_ray.envs.copies import EnvLoop, make_batch
from marl_ray.envs.vector import VectorBatch
from marl_ray.errors import MarlRayError

GROUPS = [["a", "b"]]
ZEROS = [np.zeros((2, 2), np.int64)]


@pytest.fixture
def named_here(monkeypatch, request):
    """Lets configs name the environments of this file."""
    monkeypatch.syspath_prepend(str(request.path.parent))


def test_the_loop_averages_what_agents_report_over_an_episode():
    loop = EnvLoop(EnvConfig(id="toys.envs:Reporting"), 2, GROUPS)
    for copy in range(2):
        loop.reset(copy, copy)
    returns = np.zeros(2)
    while loop.alive.any():
        returns += loop.step(ZEROS).rewards.sum(1)
    decisions = 6 + 3  # agent b leaves after half the episode
    assert [loop.metrics(c) for c in range(2)] == [{"right": r / decisions, "length": 6.0} for r in returns]
    loop.reset(1, 1)
    assert loop.metrics(1) == {} and loop.metrics(0)


def test_a_replayed_episode_has_the_metrics_of_the_played_one():
    played, replayed = (EnvLoop(EnvConfig(id="toys.envs:Reporting"), 2, GROUPS) for _ in "ab")
    played.reset(0, 3)
    for _ in range(4):
        played.step(ZEROS)
    replayed.replay(0, 3, [[np.zeros(2, np.int64)]] * 4)
    assert replayed.metrics(0) == played.metrics(0) != {}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (3.0, 'infos["metrics"] of a is 3.0, expected a dict of numbers'),
        ({"won": float("nan")}, "metric won of a is nan, expected a finite number"),
        ({"won": "yes"}, "metric won of a is 'yes', expected a finite number"),
        ({"won": 10**400}, f"metric won of a is {10**400}, expected a finite number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(metrics, words):
    with pytest.raises(MarlRayError) as refused:
        EpisodeMetrics().add("a", metrics)
    assert str(refused.value) == words


class Counting(gymnasium.Wrapper):
    """CartPole that reports the steps so far, and in every other step a flag."""

    def reset(self, **kwargs: Any) -> Any:
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, reward, terminated, truncated, _ = self.env.step(action)
        flag = {"flag": np.bool_(True)} if self.steps % 2 else {}
        return observation, reward, terminated, truncated, {"metrics": {"steps": self.steps} | flag}


def test_a_gymnasium_vector_reports_what_its_infos_have():
    makers = [lambda: Counting(gymnasium.make("CartPole-v1"))] * 2
    vector = VectorBatch(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), [["agent"]], 1)
    for copy in range(2):
        vector.reset(copy, copy)
    for _ in range(3):
        vector.step([np.zeros((2, 1), np.int64)])
    assert vector.metrics(0) == vector.metrics(1) == {"steps": 2.0, "flag": 1.0}
    vector.reset(0, 5)
    assert vector.metrics(0) == {} != vector.metrics(1)
    vector.close()


class Race(Countdown):
    """One agent walks; at the end it reports how far it came. Its batch does too, unless it is `silent`."""

    def __init__(self, silent: bool = False):
        super().__init__(agents=("a",), floats=True, ends=True)
        self.silent = silent

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.field = 0
        _, infos = super().reset(seed)
        return {"a": self.seen()}, infos

    def step(self, actions: dict[str, int]) -> Any:
        self.field += actions["a"]
        _, _, terminated, truncated, _ = super().step(actions)
        infos = {"a": {} if self.agents else {"metrics": {"field": self.field}}}
        return {"a": self.seen()}, {"a": 0.0}, terminated, truncated, infos

    def seen(self) -> np.ndarray:
        return np.array([self.time, self.field], np.float32)

    def batch(self, copies: int, groups: Sequence[Sequence[str]], signals: int) -> ArrayBatch:
        def play(states, alive, actions, rewards, costs, terminated, truncated):
            states += np.stack([np.ones(len(states)), actions[:, 0]], 1) * alive
            terminated[states[:, 0] == 6] = True

        def observe(states, copies, agents, rows):
            rows[copies, 0] = states[copies]

        report = None if self.silent else lambda state: {"field": state[1]}
        return ArrayBatch(self, copies, groups, signals, lambda seed: np.zeros(2), play, observe, report=report)


def test_a_batch_of_arrays_reports_by_a_function_of_the_last_state(named_here):
    batch = make_batch(EnvConfig(id="test_episode_metrics:Race"), 1, [["a"]])
    batch.reset(0, 0)
    for action in (1, 0, 1, 1, 0, 0):
        batch.step([np.array([[action]])])
    assert not batch.alive.any() and batch.metrics(0) == {"field": 3.0}


def test_the_check_says_which_metrics_a_run_would_not_get(named_here):
    assert all(each.failure is None for each in check("test_episode_metrics:Race", {}))
    (failed,) = (each for each in check("test_episode_metrics:Race", {"silent": True}) if each.failure is not None)
    assert failed.name == "batch" and "metrics are {}, expected {'field': " in failed.failure
    wrong = [each for each in check("test_episode_metrics:Wrong", {}) if each.failure is not None]
    assert [(each.name, each.failure) for each in wrong] == [
        ("rewards", "metric won of a is None, expected a finite number")
    ]


class Wrong(Countdown):
    """Reports what is no number."""

    def step(self, actions: dict[str, int]) -> Any:
        *results, infos = super().step(actions)
        return *results, {agent: info | {"metrics": {"won": None}} for agent, info in infos.items()}
