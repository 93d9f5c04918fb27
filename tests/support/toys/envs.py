"""Small PettingZoo environments with known behaviour, reachable from configs as `toys.envs:NAME`."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_ray.envs.arrays import ArrayBatch


class Countdown(ParallelEnv[str, Any, int]):  # type: ignore[misc]  # PettingZoo has no types
    """Agents see the time left and a random bit; an agent earns 1 for playing its bit.

    Agent `b` (if there is one) terminates after half the episode. The episode is truncated at `length`, or terminated there
    with `ends=True`.
    """

    metadata = {"name": "countdown", "render_modes": []}

    def __init__(self, length: int = 6, agents: tuple[str, ...] = ("a", "b"), ends: bool = False, floats: bool = False):
        self.length, self.ends, self.floats = length, ends, floats
        self.possible_agents = list(agents)
        self.agents: list[str] = []
        box = spaces.MultiDiscrete([length + 1, 2], dtype=np.int8)
        vector = spaces.Box(0.0, float(length), (2,), np.float32)
        self._observation_spaces = dict.fromkeys(agents, vector if floats else box)
        self._action_spaces = {agent: spaces.Discrete(2) for agent in agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_spaces[agent]

    def _observe(self) -> dict[str, np.ndarray]:
        self.bits = {agent: int(self.random.integers(2)) for agent in self.possible_agents}
        dtype = np.float32 if self.floats else np.int8
        return {a: np.array([self.length - self.time, self.bits[a]], dtype) for a in self.agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.time, self.agents = 0, list(self.possible_agents)
        observations = self._observe()
        return observations, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == set(self.agents), "exactly the living agents act"
        rewards = {agent: float(actions[agent] == self.bits[agent]) for agent in self.agents}
        self.time += 1
        over = self.time >= self.length
        terminated = {a: (over and self.ends) or (a == "b" and self.time >= self.length // 2) for a in self.agents}
        truncated = dict.fromkeys(self.agents, over and not self.ends)
        observations = self._observe()
        infos = {agent: {"cost": 0.5} for agent in self.agents}
        self.agents = [a for a in self.agents if not terminated[a] and not truncated[a]]
        return observations, rewards, terminated, truncated, infos


def countdown(**kwargs: Any) -> Countdown:
    """Make the environment of `env.id: toys.envs:countdown`."""
    return Countdown(**kwargs)


class Reporting(Countdown):
    """Reports by infos who was right in a step, and at the end of an episode how long it was."""

    def step(self, actions: dict[str, int]) -> Any:
        bits = dict(self.bits)
        observations, rewards, terminated, truncated, infos = super().step(actions)
        for agent, info in infos.items():
            info["metrics"] = {"right": actions[agent] == bits[agent]}
        if not self.agents:
            infos["a"]["metrics"]["length"] = np.int64(self.time)
        return observations, rewards, terminated, truncated, infos


class Chase(Countdown):
    """A wolf among sheep: in every step it earns 2, and every sheep loses 1, whatever they do."""

    def step(self, actions: dict[str, int]) -> Any:
        observations, _, *rest = super().step(actions)
        return observations, {agent: 2.0 if agent == "wolf" else -1.0 for agent in actions}, *rest


def chase() -> Chase:
    """Make the environment of `env.id: toys.envs:chase`."""
    return Chase(agents=("sheep_0", "wolf", "sheep_1"))


def not_an_environment() -> str:
    """A function that a mistaken `env.id` may name."""
    return "hello"


class Sprint(ParallelEnv[str, Any, int]):  # type: ignore[misc]  # PettingZoo has no types
    """One agent, which succeeds at once or fails slowly.

    Action 0 in one of the first `chances` steps earns 1 and ends the episode; without it nothing more can be had, and
    the episode continues for `length` steps. Every step costs 1.
    """

    metadata = {"name": "sprint", "render_modes": []}

    def __init__(self, chances: int = 1, length: int = 30):
        self.chances, self.length = chances, length
        self.possible_agents = ["a"]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.agents = 0, ["a"]
        return {"a": 0}, {"a": {}}

    def step(self, actions: dict[str, int]) -> Any:
        won = self.time < self.chances and actions["a"] == 0
        self.time += 1
        over = won or self.time >= self.length
        self.agents = [] if over else ["a"]
        return {"a": 1}, {"a": float(won)}, {"a": over}, {"a": False}, {"a": {"cost": 1.0}}


def sprint(**kwargs: Any) -> Sprint:
    """Make the environment of `env.id: toys.envs:sprint`."""
    return Sprint(**kwargs)


class Fragile(Countdown):
    """Kills its process in the given episode step, or stalls it for this many seconds, once.

    The first to do it leaves the file `marker` behind.
    """

    def __init__(self, marker: str, at: int, stall: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.marker, self.steps_left, self.stall = marker, at, stall

    def step(self, actions: dict[str, int]) -> Any:
        self.steps_left -= 1
        if self.steps_left == 0 and not os.path.exists(self.marker):
            with open(self.marker, "w"):
                pass
            if not self.stall:
                os._exit(1)
            time.sleep(self.stall)
        return super().step(actions)


def fragile(**kwargs: Any) -> Fragile:
    """Make the environment of `env.id: toys.envs:fragile`."""
    return Fragile(**kwargs)


class Limited(Countdown):
    """Cannot be made while `limit` of its kind are open in this process."""

    open_count = 0

    def __init__(self, limit: int = 1_000_000, **kwargs: Any):
        super().__init__(**kwargs)
        if Limited.open_count >= limit:
            raise ValueError(f"{limit} environments are open")
        Limited.open_count += 1

    def close(self) -> None:
        Limited.open_count -= 1


def limited(**kwargs: Any) -> Limited:
    """Make the environment of `env.id: toys.envs:limited`."""
    return Limited(**kwargs)


class Poisoned(Countdown):
    """Gives a reward that is not a number in every episode from number `after` on."""

    def __init__(self, after: int = 20, **kwargs: Any):
        super().__init__(**kwargs)
        self.episodes_left = after

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episodes_left -= 1
        return super().reset(seed, options)

    def step(self, actions: dict[str, int]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, {a: float("nan") if self.episodes_left < 0 else r for a, r in rewards.items()}, *rest


def poisoned(**kwargs: Any) -> Poisoned:
    """Make the environment of `env.id: toys.envs:poisoned`."""
    return Poisoned(**kwargs)


class Faulty(Countdown):
    """Gives agent b a reward that is not a number at step 2 of an episode whose seed is a multiple of 7."""

    def __init__(self, **kwargs: Any):
        super().__init__(floats=True, **kwargs)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.fault = seed is not None and seed % 7 == 0
        return super().reset(seed, options)

    def step(self, actions: dict[str, int]) -> Any:
        observations, rewards, *rest = super().step(actions)
        if self.fault and self.time == 2:
            rewards["b"] = float("nan")
        return observations, rewards, *rest


class FaultyArrays(Faulty):
    """The same fault in a batch of arrays, which pays 1 for every step."""

    def batch(self, copies: int, groups: Sequence[Sequence[str]], signals: int) -> ArrayBatch:
        return ArrayBatch(
            self, copies, groups, signals, lambda seed: np.array([seed % 7, 0.0]), self._play, self._observe_rows
        )

    @staticmethod
    def _play(states: Any, alive: Any, actions: Any, rewards: Any, costs: Any, terminated: Any, truncated: Any) -> None:
        states[:, 1] += 1
        rewards[:] = 1.0
        rewards[(states[:, 0] == 0) & (states[:, 1] == 2), 1] = np.nan
        truncated[states[:, 1] >= 6] = True

    @staticmethod
    def _observe_rows(states: Any, copies: Any, agents: Any, rows: Any) -> None:
        rows[copies] = states[copies, None]


def faulty(arrays: bool = False, **kwargs: Any) -> Faulty:
    """Make the environment of `env.id: toys.envs:faulty`."""
    return FaultyArrays(**kwargs) if arrays else Faulty(**kwargs)


class QuickAgent(ParallelEnv[str, Any, int]):  # type: ignore[misc]  # PettingZoo has no types
    """An environment in which `quick` acts once and is done, and `slow` acts alone at the next step.

    If `quick` played 1, the team is paid 1 at that step.
    """

    metadata = {"name": "quick_agent"}
    possible_agents = ["quick", "slow"]

    def __init__(self, ends: bool = True):
        self.ends = ends
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _seen(self, agents: list[str]) -> dict[str, np.ndarray]:
        return {agent: np.array([self.time, agent == "slow"], np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.agents = 0, list(self.possible_agents)
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        acting, first = self.agents, self.time == 0
        if first:
            self.played = int(actions["quick"])
        cost = 0.0 if first else float(self.played)
        self.time, self.agents = 1, ["slow"] if first else []
        terminated = {agent: agent == "quick" if first else self.ends for agent in acting}
        truncated = dict.fromkeys(acting, not first and not self.ends)
        infos = {agent: {"cost": cost * (agent == "slow")} for agent in acting}
        return self._seen(acting), dict.fromkeys(acting, 0.0), terminated, truncated, infos
