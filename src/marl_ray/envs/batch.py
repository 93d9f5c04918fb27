"""Copies of one environment stepped together as arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces

from marl_ray.config.sections import ConstraintConfig, EnvConfig
from marl_ray.envs import make_env
from marl_ray.errors import MarlRayError


class Step(NamedTuple):
    """What one step gave to the agents that acted in it; zeros for the others."""

    rewards: np.ndarray
    """(copies, agents) float32."""
    costs: np.ndarray
    """(copies, agents, signals) float32."""
    terminated: np.ndarray
    """(copies, agents) bool."""
    truncated: np.ndarray
    """(copies, agents) bool; False where terminated."""

    @classmethod
    def zeros(cls, copies: int, agents: int, signals: int) -> "Step":
        """A step in which nobody acted."""
        shape = (copies, agents)
        costs = np.zeros((*shape, signals), np.float32)
        return cls(np.zeros(shape, np.float32), costs, np.zeros(shape, bool), np.zeros(shape, bool))


class EnvBatch(Protocol):
    """Copies of one environment as arrays.

    Agents are in the order of `possible_agents`; a group is a list of agents with the same spaces (those of one
    policy). The arrays `alive` and `action_masks` are overwritten by the next reset or step.
    """

    alive: np.ndarray
    """(copies, agents) bool: who acts at the next step (the environment's `agents`)."""
    action_masks: list[np.ndarray | None]
    """Per group (copies, agents of the group, actions) bool, from `infos[agent]["action_mask"]`: all True for absent
    agents and those without one; None while the environment has given none."""

    def reset(self, copy: int, seed: int) -> None:
        """Begin an episode in one copy."""

    def step(self, actions: Sequence[np.ndarray]) -> Step:
        """Step every copy in which somebody is alive; the others are left alone.

        `actions[g]` is (copies, agents of the group, *action shape), as the environment takes them.
        """

    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        """Write the observations of each copy's last reset or step into `rows[g]`, (copies, agents of the group, D).

        Zeros for agents that the environment no longer observes; one that ended in the last step still is. `copies`
        limits it to some.
        """

    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        """Reset a copy and take the given steps (each: per group (agents of the group, *action shape)), after which
        everything is as if `step` had played them."""

    def close(self) -> None:
        """Close every copy."""


def make_batch(
    config: EnvConfig,
    copies: int,
    groups: Sequence[Sequence[str]],
    signals: int = 1,
    constraints: Sequence[ConstraintConfig] = (),
) -> EnvBatch:
    """`copies` of the environment; `groups` hold every possible agent once, `signals` is the number of cost signals.

    Raises MarlRayError as `make_env` does.
    """
    limited = any(constraint.hard_limit is not None for constraint in constraints)
    if config.id.startswith("MultiGrid-") and not limited:
        from marl_ray.envs.gridworld_batch import GridworldBatch

        return GridworldBatch(config, copies, groups, signals)
    return EnvLoop(config, copies, groups, signals, constraints)


def grouped(possible_agents: Sequence[str], groups: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Positions of each group's agents among the possible ones; MarlRayError unless each is in one group."""
    if sorted(agent for group in groups for agent in group) != sorted(possible_agents):
        raise MarlRayError(f"groups: {groups} expected to hold each of {list(possible_agents)} once")
    return [np.array([possible_agents.index(agent) for agent in group], np.int64) for group in groups]


class EnvLoop:
    """Any PettingZoo parallel environment, one copy after the other."""

    def __init__(
        self,
        config: EnvConfig,
        copies: int,
        groups: Sequence[Sequence[str]],
        signals: int = 1,
        constraints: Sequence[ConstraintConfig] = (),
    ):
        self.signals = signals
        self.envs = [make_env(config, constraints) for _ in range(copies)]
        env = self.envs[0]
        self.agents = list(env.possible_agents)
        self.groups, self.members = [list(group) for group in groups], grouped(self.agents, groups)
        self.discrete = [isinstance(env.action_space(group[0]), spaces.Discrete) for group in groups]
        self.offsets = [_start(env.observation_space(group[0])) for group in groups]
        self.alive = np.zeros((copies, len(self.agents)), bool)
        self.action_masks: list[np.ndarray | None] = [None] * len(groups)
        self.observations: list[dict[str, Any]] = [{} for _ in range(copies)]

    def reset(self, copy: int, seed: int) -> None:
        self.observations[copy], infos = self.envs[copy].reset(seed=seed)
        self._after(copy, infos)

    def step(self, actions: Sequence[np.ndarray]) -> Step:
        taken = [self._taken(g, group_actions) for g, group_actions in enumerate(actions)]
        step = Step.zeros(len(self.envs), len(self.agents), self.signals)
        for c in range(len(self.envs)):
            self._step(c, [choices[c] for choices in taken], step)
        return step

    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        self.reset(copy, seed)
        unused = Step.zeros(len(self.envs), len(self.agents), self.signals)
        for choices in actions:
            self._step(copy, [self._taken(g, chosen) for g, chosen in enumerate(choices)], unused)

    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        for c in range(len(self.envs)) if copies is None else copies:
            seen = self.observations[c]
            for group, offset, group_rows in zip(self.groups, self.offsets, rows, strict=True):
                for agent, row in zip(group, group_rows[c], strict=True):
                    row[...] = _row(seen[agent], offset) if agent in seen else 0

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _taken(self, g: int, actions: np.ndarray) -> Any:
        """Actions as environments take them; they compare Python integers much faster than NumPy scalars."""
        return np.asarray(actions).tolist() if self.discrete[g] else actions

    def _step(self, c: int, choices: Sequence[Any], step: Step) -> None:
        """Step one copy; `choices` are the actions per group and agent."""
        env = self.envs[c]
        alive = set(env.agents)
        if not alive:
            return
        chosen = {
            agent: choice
            for group, group_choices in zip(self.groups, choices, strict=True)
            for agent, choice in zip(group, group_choices, strict=True)
            if agent in alive
        }
        self.observations[c], rewards, terminated, truncated, infos = env.step(
            {agent: chosen[agent] for agent in env.agents}
        )
        for i, agent in enumerate(self.agents):
            if agent in alive:
                step.rewards[c, i] = rewards[agent]
                step.terminated[c, i] = terminated[agent]
                step.truncated[c, i] = truncated[agent] and not terminated[agent]
                if infos.get(agent):
                    step.costs[c, i] = _costs(agent, infos[agent], self.signals)
        self._after(c, infos)

    def _after(self, c: int, infos: dict[str, dict[str, Any]]) -> None:
        """Note who goes on and what they may do."""
        alive = set(self.envs[c].agents)
        self.alive[c] = [agent in alive for agent in self.agents]
        for g, group in enumerate(self.groups):
            if (masks := self.action_masks[g]) is not None:
                masks[c] = True
            for k, agent in enumerate(group):
                info = infos.get(agent)
                if info and "action_mask" in info and agent in alive:
                    self._masks(g)[c, k] = self._mask(g, agent, info["action_mask"])

    def _masks(self, g: int) -> np.ndarray:
        """Masks of a group, made when the environment gives the first one."""
        if (masks := self.action_masks[g]) is None:
            actions = getattr(self.envs[0].action_space(self.groups[g][0]), "n", 0)
            masks = self.action_masks[g] = np.ones((len(self.envs), len(self.groups[g]), actions), bool)
        return masks

    def _mask(self, g: int, agent: str, mask: Any) -> np.ndarray:
        row = np.asarray(mask)
        space = self.envs[0].action_space(agent)
        if not self.discrete[g]:
            raise MarlRayError(f'infos["action_mask"] of {agent}: expected none, its action space is {space}')
        if row.shape != (space.n,) or row.dtype.kind not in "biu" or not row.any():
            raise MarlRayError(
                f'infos["action_mask"] of {agent} is {mask!r}: expected {space.n} flags, at least one true'
            )
        return row.astype(bool)


def _row(observation: Any, offset: int) -> np.ndarray:
    """Flat row of an observation."""
    row = np.asarray(observation).reshape(-1)
    return row - offset if offset else row


def _start(space: spaces.Space[Any]) -> int:
    """What a row subtracts from an observation, so that categories count from zero."""
    return int(space.start) if isinstance(space, spaces.Discrete) else 0


def _costs(agent: str, info: dict[str, Any], signals: int) -> Any:
    """Costs in an agent's info, as many as there are signals; none is zero."""
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
