"""One copy of a text environment, and the episode that it plays."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from pettingzoo import AECEnv

from marl_ray.envs.batch import EpisodeMetrics, finite_number, in_one_line
from marl_ray.envs.copies import copy_episode
from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.engines.base import Completion


class TextEpisode(NamedTuple):
    """A finished episode.

    The first five fields, `start`, `metrics` and `decisions` are those of `ActorCriticEpisode`.
    """

    step: int
    """Number of the turn, of all agents, at which it ended; -1 if nobody could read the first prompt."""
    copy: int
    """Number of its copy among the copies of all workers."""
    episode_return: float
    """Return: sum of rewards, averaged over the agents."""
    costs: tuple[float, ...]
    """The sum of each cost signal over turns and agents."""
    length: int
    """Turns of all agents."""
    task: int
    """Index of its task in the environment's order."""
    sample: int
    """Number of this episode among the episodes of its task in an evaluation; 0 in training."""
    solved: bool | None
    """True if the environment reported the task as solved; None if it reported nothing."""
    tokens: int
    """Tokens of all responses."""
    truncated: bool
    """True if the horizon, a prompt that was too long, or a refused text has ended the episode."""
    metrics: dict[str, float]
    """Metrics that the environment reports, averaged over the episode."""
    decisions: dict[str, int]
    """Policy -> number of its decisions: the tokens of its agents' responses."""
    policy_returns: dict[str, float]
    """Policy -> return of its agents alone: sum of their rewards, averaged over them."""
    start: int = 0
    """The same as in `ActorCriticEpisode`. Every batch is whole episodes, so no episode waits for another."""


@dataclass
class EpisodeTurn:
    """One response of one agent."""

    agent: str
    number: int
    """Number of this turn among the agent's turns."""
    prompt: list[int]
    completion: Completion
    observation: str
    response: str
    costs: np.ndarray
    """(signals,) the team's costs from this turn to the end of the episode."""
    reward: float = 0.0
    """The sum of the agent's rewards from this turn to the end of the episode."""
    shortened: bool = False
    """True if the middle of the prompt was left out, because the prompt did not fit."""


@dataclass(frozen=True)
class EpisodeStart:
    """The episode that a copy plays, and its stream of random numbers."""

    index: int
    split: str
    seed: int
    greedy: bool
    stream: tuple[int, int, int, int]
    """The first four numbers of the streams of its responses (see `rng.response_stream`)."""
    sample: int = 0
    """Number of the episode among those of its task in an evaluation; 0 in training."""


@dataclass
class TextCopy:
    """An environment copy and the episode that it plays.

    `reset` and `step` touch nothing that copies share, so copies may run in different threads.
    """

    env: AECEnv
    number: int
    """Number of this copy among the copies of all workers."""
    signals: int
    """K: number of cost signals."""
    horizon: int
    """Turns of all agents after which an episode is truncated."""
    policies: Mapping[str, Sequence[str]]
    """Policy -> its agents."""
    agent: str | None = None
    """The agent that acts next; None if no episode runs."""
    observation: str = ""
    """The observation of that agent."""
    turns: list[EpisodeTurn] = field(default_factory=list)
    states: "list[TextCopy]" = field(default_factory=list)
    """The states of the running episode before some of its turns, in order (`keep_state` adds one)."""

    def __post_init__(self) -> None:
        priced = getattr(self.env.unwrapped, "cost", ())
        priced = priced[: self.signals] if isinstance(priced, list | tuple) else ()
        self.token_signals = [k for k, name in enumerate(priced) if name == "tokens"]
        """Cost signals that count the tokens of responses. The copy counts them, because an environment sees only text."""

    @property
    def acting_agent(self) -> str:
        """The agent that acts next in the running episode."""
        assert self.agent is not None
        return self.agent

    def begin(self, start: EpisodeStart) -> None:
        """Forget the last episode; `reset` begins the next."""
        self.start = start
        self.turns, self.states, self.truncated = [], [], False
        self.unreading_agent: str | None = None
        """The agent that could not read its prompt, which ended the episode."""
        self.refused = False
        """True if the environment refused the last response, which ended the episode."""
        self.rewards = dict.fromkeys(self.env.possible_agents, 0.0)
        self.costs = np.zeros(self.signals)
        self.solved: bool | None = None
        self.reports = EpisodeMetrics()

    def reset(self) -> None:
        """Begin the episode that `begin` was given. Raises the errors of `step`."""
        with self.name_errors():
            options = {"index": self.start.index, "split": self.start.split}
            self.env.reset(seed=self.start.seed, options=options)
            self._find_next_agent()
            if self.agent is None:
                raise MarlRayError("nobody acts after reset")

    def step(self) -> None:
        """Play the last of `turns`.

        An environment may refuse a text that is not in the agent's action space; that ends the episode. Raises
        MarlRayError naming environment, copy and agent if the environment raises any other error, or reports something
        that is no reward or cost.
        """
        with self.name_errors():
            text = self.turns[-1].response
            try:
                self.env.step(text)
            except (AssertionError, ValueError):
                if self.env.action_space(self.acting_agent).contains(text):
                    raise
                self._end_refused()
                return
            self._add_results()
            self._find_next_agent()

    def keep_state(self) -> None:
        """Add the present state of the episode to `states`. Raises MarlRayError where the environment cannot be copied."""
        with self.name_errors():
            self.states.append(copy_episode(self, {id(self.states): []}))

    def branch(self, number: int, attempt: int) -> "TextCopy":
        """Make an episode that continues from this state as copy `number`, with the random streams of `attempt`."""
        twin = copy.deepcopy(self)
        twin.number = number
        kind, iteration, _, _ = self.start.stream
        twin.start = replace(self.start, greedy=False, stream=(kind, iteration, attempt, number))
        return twin

    def _end_refused(self) -> None:
        """End the episode, because the environment refused the last response.

        The response's tokens still count as costs.
        """
        self._add_costs(np.zeros(self.signals))
        self.refused, self.agent, self.truncated = True, None, True

    def end_unreadable(self) -> None:
        """End the episode, because the prompt is too long for the agent that acts next.

        The rewards and costs so far count.
        """
        self.unreading_agent, self.agent, self.truncated = self.agent, None, True

    def episode(self) -> TextEpisode:
        """Return the episode that has ended."""
        return TextEpisode(
            step=len(self.turns) - 1,
            copy=self.number,
            episode_return=sum(self.rewards.values()) / len(self.rewards),
            costs=tuple(self.costs.tolist()),
            length=len(self.turns),
            task=self.start.index,
            sample=self.start.sample,
            solved=self.solved,
            tokens=sum(len(turn.completion.ids) for turn in self.turns),
            truncated=self.truncated,
            metrics=self.reports.means(),
            decisions={
                name: sum(len(turn.completion.ids) for turn in self.turns if turn.agent in agents)
                for name, agents in self.policies.items()
            },
            policy_returns={
                name: sum(self.rewards[agent] for agent in agents) / len(agents)
                for name, agents in self.policies.items()
            },
        )

    def where(self) -> str:
        """Return a text that names environment, copy and agent in errors."""
        name = (self.env.metadata or {}).get("name") or type(self.env.unwrapped).__name__
        agent = f", agent {self.agent}" if self.agent else ""
        return f"environment {name}, copy {self.number}{agent}"

    @contextmanager
    def name_errors(self) -> Iterator[None]:
        """Let errors name environment, copy and agent, within the block.

        Raises a MarlRayError of the block again, with the place before its text; any other error gets the place as a note.
        """
        try:
            yield
        except MarlRayError as error:
            raise MarlRayError(f"{self.where()}: {one_line(error)}") from error
        except Exception as error:
            error.add_note(f"in {self.where()}")
            raise

    def _find_next_agent(self) -> None:
        """Step the agents that are over out of the game, and read the next agent and its observation.

        `agent` is None where the episode has ended.
        """
        env = self.env
        for _ in env.possible_agents:
            if env.agents and self._is_over(env.agent_selection):
                env.step(None)
        self.agent, self.observation = None, ""
        if not env.agents:
            return
        if len(self.turns) >= self.horizon:
            self.truncated = True
            return
        self.agent = env.agent_selection
        if self.agent not in self.rewards:
            raise MarlRayError(f"acts, but is not among possible_agents {list(self.rewards)}")
        if self._is_over(self.agent):
            raise MarlRayError("is over, but env.step(None) does not take it out of env.agents")
        self.observation = env.observe(self.agent)
        if not isinstance(self.observation, str):
            raise MarlRayError(f"observation is of type {type(self.observation).__name__}, expected str")

    def _is_over(self, agent: str) -> bool:
        return bool(self.env.terminations.get(agent) or self.env.truncations.get(agent))

    def _add_results(self) -> None:
        """Add the step's rewards to every turn that led to it."""
        rewards, costs = self._read_rewards(), np.zeros(self.signals)
        infos = self.env.infos
        for agent, info in infos.items():
            if "cost" in info:
                costs += self._read_costs(agent, info["cost"])
            if "metrics" in info:
                self.reports.add(agent, info["metrics"])
        if solved := [bool(info["solved"]) for info in infos.values() if "solved" in info]:
            self.solved = any(solved)
        self._add_costs(costs)
        for agent, reward in rewards.items():
            self.rewards[agent] += reward
        for turn in self.turns:
            turn.reward += rewards.get(turn.agent, 0.0)

    def _add_costs(self, costs: np.ndarray) -> None:
        """Add the last turn's costs to every turn that led to it; tokens are counted here."""
        costs[self.token_signals] = len(self.turns[-1].completion.ids)
        self.costs += costs
        for turn in self.turns:
            turn.costs += costs

    def _read_rewards(self) -> dict[str, float]:
        rewards = self.env.rewards
        if not isinstance(rewards, dict) or not set(self.env.agents) <= set(rewards) <= set(self.rewards):
            got = sorted(rewards) if isinstance(rewards, dict) else type(rewards).__name__
            raise MarlRayError(f"env.rewards has {got}, expected one of each of {self.env.agents}")
        return {agent: finite_number(reward, f"reward of {agent}") for agent, reward in rewards.items()}

    def _read_costs(self, agent: str, cost: Any) -> list[float]:
        numbers = list(cost) if isinstance(cost, list | tuple | np.ndarray) and np.ndim(cost) == 1 else [cost]
        if len(numbers) != self.signals:
            expected = "a number" if self.signals == 1 else f"a sequence of {self.signals} numbers"
            raise MarlRayError(f'infos["cost"] of {agent} is {in_one_line(cost)}, expected {expected}')
        return [finite_number(number, f'infos["cost"] of {agent}') for number in numbers]
