"""Copies of an environment, which are made and stepped here.

Those with a batch of their own step at once, the others one after another.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gymnasium import spaces
from typing_extensions import override

from marl_ray.closing import Unfinished, close_all
from marl_ray.config.run.sections import ConstraintConfig, EnvConfig
from marl_ray.envs.batch import BatchStep, EnvBatch, EpisodeMetrics, group_positions
from marl_ray.envs.registry import check_reward, first_step, is_text, make_env, sample_action
from marl_ray.errors import MarlRayError, one_line
from marl_ray.extensions import import_reference

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


COMPILED_BATCHES = {
    "MultiGrid-": "marl_ray.envs.gridworld.batch:compiled_batch",
    "mpe2.": "marl_ray.envs.compiled.particles:compiled_batch",
    "gymnasium.CartPole-v1": "marl_ray.envs.compiled.cartpole:compiled_batch",
}
"""Beginning of the ids of other packages' environments -> `package.module:NAME` of the maker of their compiled batch.

The maker is a function of (config, env, copies, groups, signals), where `env` is an environment as `make_env`
returns it. It returns None for what it does not compile. An environment of this package has a method `batch`, as a
user's own has.
"""
T = TypeVar("T")


def make_batch(
    config: EnvConfig,
    copies: int,
    groups: Sequence[Sequence[str]],
    signals: int = 1,
    constraints: Sequence[ConstraintConfig] = (),
) -> EnvBatch:
    """Return `copies` of the environment, which step together.

    `groups` hold every possible agent once, `signals` is the number of cost signals. An environment that offers a batch
    is closed as soon as the batch is made. Raises MarlRayError as `make_env` does.
    """
    with ExitStack() as unneeded:  # closes the environment unless it becomes the loop's first copy
        env = unneeded.enter_context(closing(make_env(config, constraints)))
        batch = _offered_batch(config, env, copies, groups, signals, constraints)
        if batch is not None:
            return batch
        loop = EnvLoop(config, copies, groups, signals, constraints, env)
        unneeded.pop_all()
    return loop


def _offered_batch(
    config: EnvConfig,
    env: "ParallelEnv",
    copies: int,
    groups: Sequence[Sequence[str]],
    signals: int,
    constraints: Sequence[ConstraintConfig],
) -> EnvBatch | None:
    """Return the batch of COMPILED_BATCHES, or else the one that `env` itself offers.

    Returns None without any, and under hard limits, which only the loop keeps.
    """
    if any(constraint.hard_limit is not None for constraint in constraints):
        return None
    batch: EnvBatch | None = None
    for prefix, reference in COMPILED_BATCHES.items():
        if config.id.startswith(prefix):
            batch = import_reference(reference)(config, env, copies, groups, signals)
    offer = getattr(env, "batch", None)
    if batch is None and callable(offer):
        batch = offer(copies, groups, signals)
    if batch is not None and (number := len(batch.alive)) != copies:
        batch.close()
        raise MarlRayError(f"env.id: the batch of {config.id} has {number} copies, expected {copies}")
    return batch


def warm_up(config: EnvConfig, constraints: Sequence[ConstraintConfig] = (), branches: bool = False) -> None:
    """Build, reset and step the environment once, so that its compiled functions are on disk before workers need them.

    `branches` says that episodes will be copied in their middle. Raises MarlRayError as `make_env` and `check_reward` do,
    if a reward of that step is not finite, and with `branches` if the environment cannot be copied.
    """
    env = make_env(config, constraints)
    try:
        check_reward(env)
        rewards, _ = first_step(env)
        if branches and is_text(env) and not any(env.terminations.values()):
            copy_episode(env)
        if not is_text(env):
            _step_batch(config, env, constraints)
    finally:
        env.close()
    for agent, reward in rewards.items():
        if not np.isfinite(reward):
            raise MarlRayError(f"env.id: {config.id} gives {agent} a reward of {reward}, expected a finite number")


def copy_episode(episode: T, memo: dict[int, Any] | None = None) -> T:
    """Return a copy of an episode as it stands.

    Raises MarlRayError naming `train.branch_turns` where there can be none.
    """
    try:
        return copy.deepcopy(episode, memo)
    except Exception as error:
        raise MarlRayError(
            f"train.branch_turns: expected 0, or an environment that copy.deepcopy copies ({one_line(error)})"
        ) from error


def _step_batch(config: EnvConfig, env: "ParallelEnv", constraints: Sequence[ConstraintConfig]) -> None:
    """Observe and step one copy of the batch, if there is one, by actions that are possible.

    `env` has the spaces.
    """
    agents = list(env.possible_agents)
    batch = _offered_batch(config, env, 1, [[agent] for agent in agents], max(len(constraints), 1), constraints)
    if batch is None:
        return
    with closing(batch):
        batch.reset(0, 0)
        views = [env.observation_space(agent) for agent in agents]
        if all(isinstance(space, spaces.Box) for space in views):
            batch.observe([np.zeros((1, 1, math.prod(space.shape)), np.float32) for space in views])
        masks = [None if mask is None else mask[0, 0] for mask in batch.action_masks]
        actions = [sample_action(env.action_space(agent), mask) for agent, mask in zip(agents, masks, strict=True)]
        batch.step([np.asarray(action)[None, None] for action in actions])


class EnvLoop(EnvBatch):
    """Any PettingZoo parallel environment, one copy after the other."""

    def __init__(
        self,
        config: EnvConfig,
        copies: int,
        groups: Sequence[Sequence[str]],
        signals: int = 1,
        constraints: Sequence[ConstraintConfig] = (),
        first: Any = None,
    ):
        """`first` is the environment of the first copy, if it was made already."""
        self.signals = signals
        self.envs = [] if first is None else [first]
        with Unfinished() as unfinished:
            while len(self.envs) < copies:
                self.envs.append(unfinished.keep(make_env(config, constraints)))
            env = self.envs[0]
            self.agents = list(env.possible_agents)
            self.groups, self.members = [list(group) for group in groups], group_positions(self.agents, groups)
            self.discrete = [isinstance(env.action_space(group[0]), spaces.Discrete) for group in groups]
            self.offsets = [_first_category(env.observation_space(group[0])) for group in groups]
            unfinished.pop_all()
        self.alive = np.zeros((copies, len(self.agents)), bool)
        self.action_masks: list[np.ndarray | None] = [None] * len(groups)
        self.observations: list[dict[str, Any]] = [{} for _ in range(copies)]
        self.reports = [EpisodeMetrics() for _ in range(copies)]

    @override
    def reset(self, copy: int, seed: int) -> None:
        self.observations[copy], infos = self.envs[copy].reset(seed=seed)
        self.reports[copy] = EpisodeMetrics()
        self._note_living_agents(copy, infos)

    @override
    def step(self, actions: Sequence[np.ndarray]) -> BatchStep:
        taken = [self._to_env_actions(g, group_actions) for g, group_actions in enumerate(actions)]
        step = BatchStep.zeros(len(self.envs), len(self.agents), self.signals)
        for c in range(len(self.envs)):
            self._step(c, [choices[c] for choices in taken], step)
        return step

    @override
    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        self.reset(copy, seed)
        unused = BatchStep.zeros(len(self.envs), len(self.agents), self.signals)
        for choices in actions:
            self._step(
                copy, [self._to_env_actions(g, group_actions) for g, group_actions in enumerate(choices)], unused
            )

    @override
    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        for c in range(len(self.envs)) if copies is None else copies:
            observations = self.observations[c]
            for group, offset, group_rows in zip(self.groups, self.offsets, rows, strict=True):
                for agent, row in zip(group, group_rows[c], strict=True):
                    if agent not in observations:
                        row[...] = 0
                        continue
                    numbers = _flat_row(observations[agent], offset)
                    if len(numbers) != len(row):
                        raise MarlRayError(
                            f"the observation of {agent} has {len(numbers)} numbers, its space {len(row)}"
                        )
                    row[...] = numbers

    @override
    def metrics(self, copy: int) -> dict[str, float]:
        return self.reports[copy].means()

    @override
    def close(self) -> None:
        close_all(env.close for env in self.envs)

    def _to_env_actions(self, g: int, actions: np.ndarray) -> Any:
        """Return the actions as environments take them.

        Environments compare Python integers much faster than NumPy scalars.
        """
        return np.asarray(actions).tolist() if self.discrete[g] else actions

    def _step(self, c: int, choices: Sequence[Any], step: BatchStep) -> None:
        """Step one copy; `choices` are the actions per group and agent."""
        env = self.envs[c]
        alive = set(env.agents)
        if not alive:
            return
        actions = {
            agent: choice
            for group, group_choices in zip(self.groups, choices, strict=True)
            for agent, choice in zip(group, group_choices, strict=True)
            if agent in alive
        }
        self.observations[c], rewards, terminated, truncated, infos = env.step(
            {agent: actions[agent] for agent in env.agents}
        )
        for i, agent in enumerate(self.agents):
            if agent in alive:
                step.rewards[c, i] = rewards[agent]
                step.terminated[c, i] = terminated[agent]
                step.truncated[c, i] = truncated[agent] and not terminated[agent]
                if info := infos.get(agent):
                    step.costs[c, i] = _read_costs(agent, info, self.signals)
                    if "metrics" in info:
                        self.reports[c].add(agent, info["metrics"])
        self._note_living_agents(c, infos)

    def _note_living_agents(self, c: int, infos: dict[str, dict[str, Any]]) -> None:
        """Note which agents continue, and their allowed actions."""
        alive = set(self.envs[c].agents)
        self.alive[c] = [agent in alive for agent in self.agents]
        for g, group in enumerate(self.groups):
            if (masks := self.action_masks[g]) is not None:
                masks[c] = True
            for k, agent in enumerate(group):
                info = infos.get(agent)
                if info and "action_mask" in info and agent in alive:
                    self._masks(g)[c, k] = self._check_mask(g, agent, info["action_mask"])

    def _masks(self, g: int) -> np.ndarray:
        """Return the masks of a group, made when the environment gives the first one."""
        if (masks := self.action_masks[g]) is None:
            actions = getattr(self.envs[0].action_space(self.groups[g][0]), "n", 0)
            masks = self.action_masks[g] = np.ones((len(self.envs), len(self.groups[g]), actions), bool)
        return masks

    def _check_mask(self, g: int, agent: str, mask: Any) -> np.ndarray:
        row = np.asarray(mask)
        space = self.envs[0].action_space(agent)
        if not self.discrete[g]:
            raise MarlRayError(f'infos["action_mask"] of {agent}: expected none, its action space is {space}')
        if row.shape != (space.n,) or row.dtype.kind not in "biu" or not row.any():
            raise MarlRayError(
                f'infos["action_mask"] of {agent} is {mask!r}: expected {space.n} flags, at least one true'
            )
        return row.astype(bool)


def _flat_row(observation: Any, offset: int) -> np.ndarray:
    """Return the flat row of an observation."""
    row = np.asarray(observation).reshape(-1)
    return row - offset if offset else row


def _first_category(space: spaces.Space[Any]) -> int:
    """Return the number that counts as category 0: a Discrete space's start, else 0."""
    return int(space.start) if isinstance(space, spaces.Discrete) else 0


def _read_costs(agent: str, info: dict[str, Any], signals: int) -> Any:
    """Return the costs in an agent's info, as many as there are signals; none is zero."""
    if (cost := info.get("cost")) is None and "cost" not in info:
        return 0.0
    if type(cost) is float and signals == 1:
        return cost
    try:
        row = np.asarray(cost)
    except ValueError:  # a ragged sequence
        row = np.asarray(None)
    if row.dtype.kind not in "biuf" or row.shape not in ([(), (1,)] if signals == 1 else [(signals,)]):
        expected = "a number" if signals == 1 else f"a sequence of {signals} numbers"
        raise MarlRayError(f'infos["cost"] of {agent} is {" ".join(repr(cost).split())}: expected {expected}')
    return row
