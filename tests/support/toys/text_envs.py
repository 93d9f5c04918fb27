"""Small PettingZoo AEC text environments with known behaviour.

Configs reach them as `toys.text_envs:Echo` and so on.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

WORDS = ("red", "green", "blue", "black", "white")


class Toy(AECEnv[str, str, str]):  # type: ignore[misc]  # PettingZoo has no types
    """Base: `agents` speak in turns; a subclass plays in `act` and may end the episode with `finish`."""

    metadata = {"name": "toy", "render_modes": []}
    tasks = 0

    def __init__(self, agents: Sequence[str]):
        super().__init__()
        self.possible_agents = list(agents)
        self.agents: list[str] = []
        self.observation_spaces = dict.fromkeys(agents, spaces.Text(1000))
        self.action_spaces = dict.fromkeys(agents, spaces.Text(1000))

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.options = options or {}
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.rewards: dict[str, Any] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.actions_taken: list[str] = []
        self.begin(int(self.options.get("index", 0)))

    def step(self, action: str | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.infos = {agent: {} for agent in self.agents}
        self.actions_taken.append(action)
        place = self.possible_agents.index(agent)
        self.agent_selection = self.possible_agents[(place + 1) % len(self.possible_agents)]
        self.act(agent, action)
        self._accumulate_rewards()

    def begin(self, index: int) -> None:
        """A new episode."""

    def act(self, agent: str, text: str) -> None:
        """The agent spoke."""

    def finish(self, solved: bool) -> None:
        self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = self.agents[0]
        for agent in self.agents:
            self.infos[agent] |= {"solved": solved, "metrics": {"words": float(len(self.actions_taken))}}


class Echo(Toy):
    """One agent sees a word and earns 1 for repeating it.

    The word is the task's, the number behind it the seed's.
    """

    metadata = {"name": "echo", "render_modes": []}
    tasks = 20

    def __init__(self) -> None:
        super().__init__(["speaker"])

    def begin(self, index: int) -> None:
        self.word = WORDS[index % len(WORDS)]
        self.number = int(self.random.integers(1000))

    def level(self, index: int) -> float:
        """Later words of WORDS are harder."""
        return float(index % len(WORDS))

    def observe(self, agent: str) -> str:
        return f"say {self.word} {self.number} {self.options.get('index')} {self.options.get('split')}"

    def act(self, agent: str, text: str) -> None:
        self.rewards[agent] = float(text == self.word)
        self.finish(text == self.word)


class Talk(Toy):
    """`asker` and `teller` take turns, and each hears the last word.

    A turn pays the speaker 1 for an "a" in it, and the other 0.5 a turn later; each costs 1. It ends after `length`
    turns, or as soon as somebody says "stop".
    """

    metadata = {"name": "talk", "render_modes": []}
    cost: Any = ()

    def __init__(self, length: int = 4, cost: Sequence[str] = ("turns",)) -> None:
        super().__init__(["asker", "teller"])
        self.length, self.cost = length, tuple(cost)

    def observe(self, agent: str) -> str:
        last = self.actions_taken[-1] if self.actions_taken else "nothing"
        return f"task {self.options.get('index')} you are {agent}, heard {last!r}"

    def act(self, agent: str, text: str) -> None:
        other = self.agent_selection
        self.rewards[agent] = float("a" in text)
        if len(self.actions_taken) > 1 and other in self.rewards:
            self.rewards[other] += 0.5 * ("a" in self.actions_taken[-2])
        self.infos[agent]["cost"] = 1.0 if len(self.cost) == 1 else [1.0] * len(self.cost)
        if len(self.actions_taken) == self.length or text == "stop":
            self.finish("a" in text)


class Quitter(Talk):
    """Talk in which `teller` is over after its first turn and `asker` continues alone."""

    metadata = {"name": "quitter", "render_modes": []}

    def act(self, agent: str, text: str) -> None:
        super().act(agent, text)
        if agent == "teller":
            self.terminations["teller"] = True
            self.agent_selection = "teller"

    def step(self, action: str | None) -> None:
        super().step(action)
        if "teller" not in self.agents and self.agents:
            self.agent_selection = "asker"


class Strict(Talk):
    """Talk that takes letters only, as its action space says."""

    metadata = {"name": "strict", "render_modes": []}

    def step(self, action: str | None) -> None:
        assert action is None or self.action_space(self.agent_selection).contains(action)
        super().step(action)


class Slow(Echo):
    """Echo whose steps take `seconds`; `max_asleep` is how many slept at once in any copy."""

    metadata = {"name": "slow", "render_modes": []}
    lock, asleep, max_asleep = threading.Lock(), 0, 0

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.seconds = seconds

    def act(self, agent: str, text: str) -> None:
        with Slow.lock:
            Slow.asleep += 1
            Slow.max_asleep = max(Slow.max_asleep, Slow.asleep)
        time.sleep(self.seconds)
        with Slow.lock:
            Slow.asleep -= 1
        super().act(agent, text)


class Broken(Echo):
    """Echo that reports what the test gives it."""

    metadata = {"name": "broken", "render_modes": []}

    def __init__(self, rewards: Any = None, infos: Any = None, observation: Any = None, error: Any = None) -> None:
        super().__init__()
        self.broken_rewards, self.broken_infos, self.observation, self.error = rewards, infos, observation, error

    def observe(self, agent: str) -> Any:
        return super().observe(agent) if self.observation is None else self.observation

    def step(self, action: str | None) -> None:
        if self.error is not None:
            raise self.error
        super().step(action)

    def act(self, agent: str, text: str) -> None:
        super().act(agent, text)
        if self.broken_rewards is not None:
            self.rewards = self.broken_rewards
        if self.broken_infos is not None:
            self.infos = {agent: self.broken_infos}

    def _accumulate_rewards(self) -> None:
        """Adds nothing that is broken."""


def least_solved(position: int, solved: Mapping[int, float], tasks: int) -> int:
    """A curriculum: of every four tasks in turn, the one that was solved least."""
    four = [(4 * position + i) % tasks for i in range(4)]
    return min(four, key=lambda index: (solved.get(index, 0.0), index))
