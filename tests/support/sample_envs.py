"""Environments that users may name as `env.id: sample_envs:NAME`: right ones and wrong ones."""

import math
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from toys.envs import Countdown


class Counter(ParallelEnv[str, Any, Any]):  # type: ignore[misc]  # PettingZoo has no types
    """Both agents see the time; the episode is truncated at `length`."""

    metadata = {"name": "counter", "is_parallelizable": True}

    def __init__(self, length: int = 3):
        assert length > 0
        self.length = length
        self.possible_agents = ["a", "b"]
        self.agents: list[str] = []
        self.spaces: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
            agent: (spaces.Discrete(length + 1), spaces.Discrete(2)) for agent in self.possible_agents
        }

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.spaces[agent][0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.spaces[agent][1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.time, self.agents = 0, list(self.possible_agents)
        return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.time += 1
        alive, over = self.agents, self.time >= self.length
        self.agents = [] if over else alive
        result = (dict.fromkeys(alive, value) for value in (self.time, 1.0, False, over))
        return *result, {agent: {} for agent in alive}


class Misfit(Counter):
    """Its spaces are of three float32 from 0 to 1, its observations `value` in arrays of another shape or kind."""

    def __init__(self, value: float, shape: list[int], dtype: str):
        super().__init__()
        self.seen = np.full(shape, value, dtype)
        box = spaces.Box(0, 1, (3,), np.float32)
        self.spaces = {agent: (box, spaces.Discrete(2)) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observations, infos = super().reset(seed, options)
        return dict.fromkeys(observations, self.seen), infos

    def step(self, actions: dict[str, int]) -> Any:
        observations, *others = super().step(actions)
        return dict.fromkeys(observations, self.seen), *others


class Opened(Counter):
    """It notes how many of it are open, and fails to close if it is stuck."""

    now: ClassVar[list["Opened"]] = []

    def __init__(self, stuck: bool = False):
        super().__init__()
        self.stuck = stuck
        self.now.append(self)

    def close(self) -> None:
        self.now.remove(self)
        if self.stuck:
            raise OSError("it is stuck")


class Recorded(Counter):
    """It notes what is asked of it."""

    calls: ClassVar[list[str]] = []

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.calls.append("reset")
        return super().reset(seed, options)

    def step(self, actions: dict[str, int]) -> Any:
        self.calls.append("step")
        return super().step(actions)

    def close(self) -> None:
        self.calls.append("close")


class Unpaid(Counter):
    """Its rewards are not numbers."""

    def step(self, actions: dict[str, int]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards, math.nan), *rest


class NewSpaces(Counter):
    """It makes a new space at every call, and pays each agent its action."""

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(1000)

    def step(self, actions: dict[str, int]) -> Any:
        observations, _, *rest = super().step(actions)
        return observations, {agent: float(action) for agent, action in actions.items()}, *rest


class Turns(AECEnv[str, int, int]):  # type: ignore[misc]  # PettingZoo has no types
    """Agents act in turn; the episode is truncated after `length` rounds."""

    def __init__(self, length: int = 3, parallel: bool = True):
        super().__init__()
        self.metadata = {"name": "turns", "is_parallelizable": parallel}
        self.length = length
        self.possible_agents = ["a", "b"]
        self.observation_spaces = {agent: spaces.Discrete(length + 1) for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(2) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Discrete:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def observe(self, agent: str) -> int:
        return self.time

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.time, self.agents, self.agent_selection = 0, list(self.possible_agents), "a"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}

    def step(self, action: int | None) -> None:
        if self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        if self.agent_selection == "b":
            self.time += 1
            self.truncations = dict.fromkeys(self.agents, self.time >= self.length)
        self.agent_selection = "b" if self.agent_selection == "a" else "a"


def hello() -> str:
    """No environment."""
    return "hello"


NOT_CALLABLE = 3
"""A number where an environment is expected."""


class Greedy(Countdown):
    """Takes the names of its agents out of the list that it is given."""

    def __init__(self, names: list[str]):
        super().__init__(agents=(names.pop(), names.pop()))
