"""The interface of copies of one environment that are stepped together as arrays."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np

from marl_ray.errors import MarlRayError


class BatchStep(NamedTuple):
    """The results of one step for the agents that acted in it; zeros for the others."""

    rewards: np.ndarray
    """(copies, agents) float32."""
    costs: np.ndarray
    """(copies, agents, signals) float32."""
    terminated: np.ndarray
    """(copies, agents) bool."""
    truncated: np.ndarray
    """(copies, agents) bool; False where terminated."""

    @classmethod
    def zeros(cls, copies: int, agents: int, signals: int) -> "BatchStep":
        """Return a step in which nobody acted."""
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
    can_replay: bool = True
    """False if `replay` takes no steps, so that an episode in its middle can only begin anew."""

    def reset(self, copy: int, seed: int) -> None:
        """Begin an episode in one copy."""

    def step(self, actions: Sequence[np.ndarray]) -> BatchStep:
        """Step every copy in which somebody is alive; the others are left alone.

        `actions[g]` is `(copies, agents of the group, *action shape)`, as the environment takes them.
        """

    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        """Write the observations of each copy's last reset or step into `rows[g]`, (copies, agents of the group, D).

        Zeros for agents that the environment no longer observes; one that ended in the last step still is. `copies`
        limits it to some.
        """

    def metrics(self, copy: int) -> dict[str, float]:
        """Return the numbers that the environment has reported of the copy's last episode so far, by name.

        The numbers are those of `infos[agent]["metrics"]`, averaged over the steps and agents that gave each.
        """

    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        """Reset a copy and take the given steps, after which everything is as if `step` had played them.

        Each step has the actions of every group, `(agents of the group, *action shape)`. Nothing calls it where
        `can_replay` is False.
        """

    def close(self) -> None:
        """Close every copy."""


class EpisodeMetrics:
    """The numbers that an environment reports of one episode, as `infos[agent]["metrics"]` of its steps."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}
        """Name -> (sum, count)."""

    def add(self, agent: str, metrics: Any) -> None:
        """Add what one agent's infos have of a step. Raises MarlRayError unless it is a dict of finite numbers."""
        if not isinstance(metrics, Mapping):
            raise MarlRayError(f'infos["metrics"] of {agent} is {in_one_line(metrics)}, expected a dict of numbers')
        for name, value in metrics.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = total + finite_number(value, f"metric {name} of {agent}"), count + 1

    def means(self) -> dict[str, float]:
        """Return the mean of each number over the steps and agents that gave it."""
        return {name: total / count for name, (total, count) in self.sums.items()}


def finite_number(value: Any, what: str) -> float:
    """Return a number, or a flag as 0 or 1, that an environment has reported.

    Raises MarlRayError unless it is finite.
    """
    try:
        number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    except OverflowError:  # a whole number above the largest float
        number = math.inf
    if not math.isfinite(number):
        raise MarlRayError(f"{what} is {in_one_line(value)}, expected a finite number")
    return number


def in_one_line(value: Any) -> str:
    """Return the text of a value for an error, without the line breaks that an array's has."""
    return " ".join(repr(value).split())


def group_positions(possible_agents: Sequence[str], groups: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return the positions of each group's agents among the possible ones.

    Raises MarlRayError unless each agent is in one group.
    """
    if sorted(agent for group in groups for agent in group) != sorted(possible_agents):
        raise MarlRayError(f"groups: {groups} expected to hold each of {list(possible_agents)} once")
    return [np.array([possible_agents.index(agent) for agent in group], np.int64) for group in groups]
