"""Tiny games whose every path can be listed, as PettingZoo environments of two steps and two actions."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.envs.text.base import TextEnv

EPISODE_STEPS = 2
"""Number of steps of an episode."""
STATE_COUNT = 5
"""Number of states: 0 at the start; 1 and 2 after one step, 3 and 4 after two, by what the agents did."""
SIGNAL_COUNT = 2
"""Number of cost signals."""
POLICY_NAMES = ("first", "second")
MAX_DECIDERS = 5
"""Maximum number of agents that decide at once; one more would double the paths."""
FORCED_MASK = np.array([True, False])
"""Action mask of an agent without a choice."""


class StepResult(NamedTuple):
    """Result of one step of all agents."""

    state: int
    reward: float
    """Reward of every agent."""
    costs: tuple[float, float]
    """Costs of the whole team, by signal."""
    over: bool
    """True if the episode is over after the step."""


class GameStep(NamedTuple):
    """One step of a path."""

    state: int
    actions: tuple[int, ...]
    """Action of every agent; a forced one is 0."""
    moved: StepResult
    """The result of the step."""


@dataclass(frozen=True)
class GameRules:
    """A game: `agents` agents of each of `policies` policies, all with the team's reward.

    At the first step every agent decides but a sixth one, at the second the first agent alone; other moves are forced.
    """

    policies: int = 1
    agents: int = 1
    is_terminated: bool = True
    """True if the episode terminates; otherwise it is truncated."""
    early: bool = False
    """True if the episode terminates after one step when the first agent plays 1."""
    rewarded: bool = True
    """False if every reward is 0."""
    priced: bool = True
    """False if every cost is 0."""

    @property
    def count(self) -> int:
        """Number of agents, of all policies."""
        return self.policies * self.agents

    @property
    def names(self) -> list[str]:
        """The names of the agents, policy by policy, each made of its policy's name and its number there."""
        return [f"{policy}_{k}" for policy in POLICY_NAMES[: self.policies] for k in range(self.agents)]

    def decides(self, agent: int, time: int) -> bool:
        """Return True if the agent has a choice at this step."""
        return agent < MAX_DECIDERS if time == 0 else agent == 0

    def decisions(self, time: int) -> list[int]:
        """Return the agents that have a choice at this step."""
        return [agent for agent in range(self.count) if self.decides(agent, time)]

    @lru_cache(maxsize=4096)  # noqa: B019 - rules are few and small
    def move(self, state: int, actions: tuple[int, ...]) -> StepResult:
        """Return the state, reward and costs after a step.

        Reward and costs grow with the share of agents that play 1, and with combinations.
        """
        time, bit = (0, 0) if state == 0 else (1, state - 1)
        deciding = self.decisions(time)
        weights = [1 + agent for agent in deciding]
        share = sum(weight * actions[agent] for weight, agent in zip(weights, deciding, strict=True)) / sum(weights)
        first, last = actions[deciding[0]], actions[deciding[-1]]
        reward = (0.4 * share + 0.5 * bit * (1 - share) + 0.1 * first * last) / EPISODE_STEPS
        costs = (share * (1 + bit) + 0.5 * first * (2 - last), 0.2 + (1 - share) * (2 - bit))
        over = time + 1 == EPISODE_STEPS or (self.early and actions[0] == 1)
        return StepResult(
            2 * time + 1 + (2 * sum(actions) > len(deciding)),
            reward if self.rewarded else 0.0,
            costs if self.priced else (0.0, 0.0),
            over,
        )

    def paths(self, max_steps: int = EPISODE_STEPS) -> Iterator[list[GameStep]]:
        """Yield every path of at most `max_steps` steps from the start."""
        yield from self._paths_from(0, max_steps)

    def _paths_from(self, state: int, max_steps: int) -> Iterator[list[GameStep]]:
        time = 0 if state == 0 else 1
        for step in self.steps(state):
            if step.moved.over or time + 1 == max_steps:
                yield [step]
            else:
                yield from ([step, *tail] for tail in self._paths_from(step.moved.state, max_steps))

    def steps(self, state: int) -> Iterator[GameStep]:
        """Yield every joint move in a state."""
        deciding = self.decisions(0 if state == 0 else 1)
        for choices in itertools.product((0, 1), repeat=len(deciding)):
            actions = [0] * self.count
            for agent, action in zip(deciding, choices, strict=True):
                actions[agent] = action
            yield GameStep(state, tuple(actions), self.move(state, tuple(actions)))


class TinyGame(ParallelEnv[str, np.ndarray, int]):  # type: ignore[misc]  # PettingZoo has no types
    """The game as an environment. An agent sees the state and its number among the agents of its policy."""

    metadata = {"name": "tiny_game", "render_modes": []}

    def __init__(self, **rules: Any):
        self.rules = GameRules(**rules)
        self.possible_agents = self.rules.names
        self.agents: list[str] = []
        self.state_number = 0
        self._observation_space = spaces.MultiDiscrete([STATE_COUNT, self.rules.agents])
        self._action_space = spaces.Discrete(2)
        self._rows = _observations(self.rules)

    @override
    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_space

    @override
    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_space

    @override
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.state_number, self.agents = 0, list(self.possible_agents)
        return self._observe(), self._infos()

    @override
    def step(self, actions: dict[str, int]) -> Any:
        moved = self.rules.move(self.state_number, tuple(int(actions[name]) for name in self.possible_agents))
        ended = moved.over and (self.rules.is_terminated or self.state_number == 0)
        self.state_number = moved.state
        names = self.possible_agents
        infos = self._infos()
        weight = sum(range(1, len(names) + 1))
        if self.rules.priced:
            for number, name in enumerate(names):  # a budget is the team's, whoever pays
                infos[name]["cost"] = [cost * (number + 1) / weight for cost in moved.costs]
        if moved.over:
            self.agents = []
        return (
            self._observe(),
            dict.fromkeys(names, moved.reward),
            dict.fromkeys(names, ended),
            dict.fromkeys(names, moved.over and not ended),
            infos,
        )

    def _observe(self) -> dict[str, np.ndarray]:
        return dict(zip(self.possible_agents, self._rows[self.state_number], strict=True))

    def _infos(self) -> dict[str, dict[str, object]]:
        time = 0 if self.state_number == 0 else 1
        return {
            name: {} if self.rules.decides(number, time) else {"action_mask": FORCED_MASK}
            for number, name in enumerate(self.possible_agents)
        }


@lru_cache(maxsize=64)
def _observations(rules: GameRules) -> list[list[np.ndarray]]:
    """Return the observations by state and agent."""
    return [[np.array([state, number % rules.agents]) for number in range(rules.count)] for state in range(STATE_COUNT)]


class TinyTalk(TextEnv):
    """Every agent answers the same prompt once; nothing is earned and nothing costs."""

    def __init__(self, policies: int = 1, agents: int = 1, cost: Sequence[str] = ()):
        super().__init__(GameRules(policies, agents).names, cost=cost)

    @override
    def begin(self) -> None:
        self.waiting_agents = list(self.possible_agents)
        self.ask(self.waiting_agents.pop(0), "?")

    @override
    def act(self, agent: str, text: str) -> None:
        if self.waiting_agents:
            self.ask(self.waiting_agents.pop(0), "?")
        else:
            self.finish(False)
