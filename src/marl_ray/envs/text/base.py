"""The base of text environments: agents read a prompt and write an answer, in turns."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import AECEnv
from typing_extensions import override

from marl_ray.errors import MarlRayError
from marl_ray.rewards.protocol import ChosenReward, make_reward

COSTS = ("tokens", "calls", "seconds")
"""The costs that may have a budget: UTF-8 bytes of the answer (a caller that knows its tokens may count those instead),
runs of tools, and the seconds that these took."""
MAX_TEXT_LENGTH = 1 << 24
"""Characters of the longest text that an agent may read or write: more than any context holds."""
_MAX_SAMPLE_LENGTH = 64
"""Characters of the longest drawn text: an answer of any length serves where one is drawn."""
_MAX_TURNS = 100
"""Maximum number of turns of the episode in which a reward is checked."""
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


class AnyText(spaces.Text):
    """Every str of at most 2**24 characters; a sample is up to 64 characters of ASCII.

    A charset of all of Unicode would take 100 MB in each space.
    """

    def __init__(self) -> None:
        super().__init__(MAX_TEXT_LENGTH, min_length=0, charset=_PRINTABLE)

    @override
    def contains(self, x: object) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    @override
    def sample(self, mask: Any = None, probability: Any = None) -> str:
        if mask is None and probability is None:
            mask = int(self.np_random.integers(_MAX_SAMPLE_LENGTH + 1)), None
        return super().sample(mask, probability)


@dataclass(frozen=True)
class Demonstration:
    """A prompt, and the response of a scripted expert."""

    agent: str
    prompt: str
    response: str


class Task(Protocol):
    """The task of an episode."""

    @property
    def task_id(self) -> str:
        """The task's name in transcripts and curricula."""

    @property
    def prompt(self) -> str:
        """The task in words, as the agents read it."""

    @property
    def level(self) -> float:
        """A number that is lower for easier tasks: the curriculum `easiest_first` orders tasks by it."""


T = TypeVar("T", bound=Task)


class TextEnv(AECEnv[str, str, str], ABC):  # type: ignore[misc]  # PettingZoo has no types
    """Base of text environments.

    A subclass says what happens in `begin` and `act`, and there calls `ask` or `finish` last.
    Observation and action of every agent: a str (`AnyText`). The prompt of the agent whose turn it is says all it needs.
    After a step `rewards` and `infos` tell what that step caused, for every agent:
    `infos[agent]["cost"]` (K,) a tuple, one number for each name in `cost`, where any is given.
    At the end of an episode, before the agents are removed, besides: `solved` bool, the same for all agents;
    `metrics` dict of float, with `turns`, the steps that the episode took.
    """

    metadata = {"name": "text", "render_modes": [], "is_parallelizable": False}
    fixed: ClassVar[tuple[str, ...]] = ("train", "test", "task", "reward", "_spaces")
    """Attributes that no episode changes, which a `copy.deepcopy` of a running episode shares with it."""

    def __init__(
        self,
        agents: Sequence[str],
        train: Sequence[Task] = (),
        test: Sequence[Task] = (),
        *,
        seed: int = 0,
        cost: Sequence[str] = (),
        reward: ChosenReward = "solved",
    ):
        """`seed` orders the training tasks. `reward` is what `pay` asks.

        ValueError for an unknown name in `cost`; MarlRayError for a reward that cannot be made, or that reads what the
        tasks do not have.
        """
        super().__init__()
        unknown = [name for name in cost if name not in COSTS]
        if unknown:
            raise ValueError(f"cost: {unknown[0]!r}, expected some of {', '.join(COSTS)}")
        self.possible_agents = list(agents)
        self.agents: list[str] = []
        self.cost = tuple(cost)
        self.train, self.test, self.seed = train, test, seed
        self.reward, self._strict = make_reward(reward), False
        for task in (*train, *test)[:1]:
            self.reward.check_task(task)
        self.task: Any = None
        self._spaces = {agent: AnyText() for agent in agents}
        self._random = np.random.default_rng()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the episode as it stands, to be played on beside this one."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        for name in self.fixed:
            memo[id(getattr(self, name))] = getattr(self, name)
        twin.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return twin

    @abstractmethod
    def begin(self) -> None:
        """Start the episode of `self.task` (None where the environment has no tasks): `ask` the first agent."""

    @abstractmethod
    def act(self, agent: str, text: str) -> None:
        """Take the agent's answer: `earn`, `spend`, then `ask` the next agent or `finish`."""

    @property
    def tasks(self) -> int:
        """Number of training tasks."""
        return len(self.train)

    @property
    def held_out(self) -> int:
        """Number of held-out tasks."""
        return len(self.test)

    def level(self, index: int) -> float:
        """Return the difficulty of the training task that `reset(options={"index": index})` begins."""
        return float(self.task_at(index, "train").level)

    def task_at(self, index: int, split: str) -> Any:
        """Return the task that `reset(options={"index": index, "split": split})` begins.

        Raises MarlRayError for another split than train and test, for one without tasks and for an index beyond its end.
        """
        if split not in ("train", "test"):
            raise MarlRayError(f"split={split!r}, expected 'train' or 'test'")
        tasks = self.train if split == "train" else self.test
        if not tasks:
            raise MarlRayError(f"env.kwargs: {self} has no tasks in split {split!r}")
        number = (
            task_index(len(tasks), self.seed, index)
            if split == "train"
            else task_index(len(tasks), 0, index % len(tasks))
        )
        return tasks[number]

    @override
    def observation_space(self, agent: str) -> spaces.Space[str]:
        return self._spaces[agent]

    @override
    def action_space(self, agent: str) -> spaces.Space[str]:
        return self._spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode.

        Options: `index` (int) counts tasks from the run's start. Training tasks come in an order of their own in every
        epoch, held-out ones in one order, the same in every run. `split`: `train` (default) or `test`. Without an index
        the task is drawn from a generator that `seed` starts. Raises MarlRayError where the split has no tasks.
        """
        if seed is not None:
            self._random = np.random.default_rng(seed)
        settings = options or {}
        if self.train or self.test:
            split = settings.get("split", "train")
            self.task = self.task_at(int(settings.get("index", self._random.integers(1 << 31))), split)
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._prompts = dict.fromkeys(self.agents, "")
        self._turns = 0
        self._clear()
        self.begin()
        self._report_costs()

    def step(self, action: str | None) -> None:
        """Take the answer of the agent whose turn it is; None from one whose episode is over.

        Raises TypeError for an answer that is no text.
        """
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if not isinstance(action, str):
            raise TypeError(f"action of {agent} is of type {type(action).__name__}, expected str")
        self._cumulative_rewards[agent] = 0.0
        self._clear()
        self._turns += 1
        self.spend(agent, tokens=len(action.encode("utf-8", "surrogatepass")))
        self.act(agent, action)
        self._report_costs()
        self._accumulate_rewards()

    def observe(self, agent: str) -> str:
        """Return the prompt that the agent was last given in this episode; empty before the first."""
        return self._prompts[agent]

    def ask(self, agent: str, prompt: str) -> None:
        """Give the turn to `agent`, who must answer `prompt`."""
        self.agent_selection, self._prompts[agent] = agent, prompt

    def earn(self, reward: float, agent: str | None = None) -> None:
        """Reward one agent, or each of them."""
        for name in self.agents if agent is None else (agent,):
            self.rewards[name] += reward

    def pay(self, answer: str, metrics: dict[str, float]) -> dict[str, float]:
        """Pay each agent what `reward` pays for the answer to the prompt that the acting agent read.

        `metrics` are the environment's own; returns them with those of the reward, for `finish`.
        """
        prompt = self.observe(self.agent_selection)
        value, more = self.reward.pay(prompt, answer, self.task, metrics, self._strict)
        self.earn(value)
        return {**more, **metrics}

    def check_reward(self) -> None:
        """Play an episode of drawn texts in which a user's reward must pay a finite number.

        MarlRayError says what it raised or returned. A built-in reward is not asked: it may cost.
        """
        if self.reward.built_in:
            return
        self._strict = True
        self.reset(seed=0)
        for _ in range(_MAX_TURNS):
            if any(self.terminations.values()):
                break
            self.step(self.action_space(self.agent_selection).sample())
        self._strict = False

    def spend(self, agent: str, tokens: float = 0.0, calls: float = 0.0, seconds: float = 0.0) -> None:
        """Add to the costs of the agent in this step."""
        for name, amount in zip(COSTS, (tokens, calls, seconds), strict=True):
            self._spent[agent][name] += amount

    def finish(self, solved: bool, metrics: dict[str, float] | None = None) -> None:
        """End the episode for all agents."""
        self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = self.agents[0]
        for agent in self.agents:
            self.infos[agent] |= {"solved": solved, "metrics": {**(metrics or {}), "turns": float(self._turns)}}

    def _clear(self) -> None:
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._spent = {agent: dict.fromkeys(COSTS, 0.0) for agent in self.agents}

    def _report_costs(self) -> None:
        if self.cost:
            for agent in self.agents:
                self.infos[agent]["cost"] = tuple(self._spent[agent][name] for name in self.cost)


def task_index(count: int, seed: int, index: int) -> int:
    """Return the position of task number `index` of a run among `count` tasks; every epoch shuffles all tasks anew."""
    epoch, position = divmod(index, count)
    return int(_shuffle(count, seed, epoch)[position])


@lru_cache(maxsize=8)
def _shuffle(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def is_held_out(prompt: str, share: float) -> bool:
    """Return True if a task belongs to the held-out share, by a hash of its prompt alone.

    The answer is the same in every run, and a task that stands twice in the data never stands on both sides.
    """
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * (1 << 64)


def split_tasks(tasks: Sequence[T], held_out: float) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Return the training and held-out tasks; about the share `held_out` is held out."""
    sides = tuple(is_held_out(task.prompt, held_out) for task in tasks)
    train = tuple(task for task, test in zip(tasks, sides, strict=True) if not test)
    return train, tuple(task for task, test in zip(tasks, sides, strict=True) if test)


def find_tasks(
    data: str | None,
    test_data: str | None,
    held_out: float,
    read: Callable[[str], tuple[T, ...]],
    make: Callable[[str], tuple[T, ...]],
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Return the training and held-out tasks of an environment.

    The tasks are read from files, or made for a split where no file is given. Of `data` the share `held_out` is held
    out, unless `test_data` is what is held out. Raises ValueError for arguments that make no sense, MarlRayError
    as `read` does.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out}, expected at least 0 and below 1")
    if data is None:
        if test_data is not None:
            raise ValueError("test_data: expected with `data`, the training tasks")
        return make("train"), make("test")
    if test_data is not None:
        return read(data), read(test_data)
    train, test = split_tasks(read(data), held_out)
    if not train:
        raise ValueError(f"held_out={held_out}: leaves no training task in {data}")
    return train, test


def check_template(name: str, template: str, fields: Sequence[str]) -> str:
    """Return the template, if `str.format` can fill it with these fields.

    Raises ValueError naming the template if not.
    """
    try:
        template.format(**dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        allowed = ", ".join(f"{{{field}}}" for field in fields)
        raise ValueError(f"{name}: {template!r} cannot be filled ({error!r}); expected only {allowed}") from None
    return template
