"""A limit on the cost of every single episode, kept by taking away the actions that would break it.

Constraint algorithms hold a limit on average. Here each episode holds it, by reservation: an action is allowed only if,
after its cost, there is enough left for the cheapest rest of the episode (anytime constraints, arXiv:2311.05511; what is
spent becomes part of the observation, as in Saute RL, arXiv:2202.06558). Actions that a player should not have chosen are
replaced (a shield, Alshiekh et al., AAAI 2018), so the promise rests on the environment's numbers and on no policy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from typing_extensions import override

from marl_ray.errors import MarlRayError

REMAINING_LEVELS = 32
"""Levels of the remaining limit in a categorical observation."""
TOLERANCE = 1e-6
"""Amount by which rounding may exceed a limit; once per episode, not once per step."""


class HardBudget(BaseParallelWrapper[str, Any, Any]):  # type: ignore[misc]  # PettingZoo has no types
    """No episode's cost, summed over agents, passes a limit, if the environment tells its costs ahead.

    Read from the infos of reset and step, for the S cost signals of `limits`:

    - `cost`: number, or (S,): what the agent spent in this step.
    - `next_costs`: (actions,) if S = 1, or (actions, S): the most that each action can cost in the next step.
      Agents without it are taken to cost nothing.
    - `least_cost_to_go`: same shapes: the agent's share of the least that the rest of the episode costs after each
      action, zero when absent. Over the living agents the shares must sum to enough for the whole team. With several
      signals, rows must be the costs of one way to continue, not the least of each signal by itself.
    - `action_mask`: (actions,), what the environment itself allows; all if absent.

    Written: `action_mask`, int8, without the actions that are not affordable. An action outside the mask is replaced by
    the agent's cheapest allowed one before the environment sees it.

    Observations get one more entry per limited signal, the share of the limit that is left: a float in [0, 1] in a
    one-dimensional Box; one of 32 levels in a MultiDiscrete or Discrete one, which becomes MultiDiscrete.

    The promise holds if the limits are at least the cost of the cheapest plan. Below that, or without
    `least_cost_to_go`, a state in which nothing is affordable leaves each agent its cheapest action alone.
    """

    def __init__(self, env: ParallelEnv[str, Any, Any], limits: Sequence[float | None]):
        """`limits[s]` bounds signal s, in its own units; None leaves it free. Raises MarlRayError naming `constraints`."""
        super().__init__(env)
        self._signals = [s for s, limit in enumerate(limits) if limit is not None]
        self._limits = np.array([limit for limit in limits if limit is not None], np.float64)
        self._count = len(limits)
        if not self._signals or not (self._limits >= 0).all():
            raise MarlRayError(f"constraints: hard limits {list(limits)}, expected at least one and none negative")
        self._spaces = {agent: env.observation_space(agent) for agent in env.possible_agents}
        # PettingZoo wants the same space object at every call.
        extra = len(self._signals)
        self._wider_spaces = {agent: _widen_space(agent, space, extra) for agent, space in self._spaces.items()}
        self._allowed: dict[str, np.ndarray] = {}
        self._cheapest: dict[str, int] = {}

    @override
    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._wider_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
        """Begin an episode with nothing spent. Raises MarlRayError if no agent reports `next_costs`."""
        observations, infos = self.env.reset(seed=seed, options=options)
        if not any("next_costs" in infos[agent] for agent in self.env.agents):
            raise MarlRayError("constraints: hard_limit needs an environment that reports infos[agent]['next_costs']")
        self._spent, self._time = np.zeros(len(self._limits)), 0
        return self._observe(observations), self._mask(infos)

    def step(self, actions: dict[str, object]) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        """Step the environment with the actions, those outside the masks replaced, and account for their costs."""
        actions = {agent: self._shield(agent, action) for agent, action in actions.items()}
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        for agent, info in infos.items():
            if "cost" in info and agent in self._spaces:
                self._spent += self._cost(agent, info["cost"])
        self._time += 1
        return self._observe(observations), rewards, terminated, truncated, self._mask(infos)

    def _shield(self, agent: str, action: Any) -> object:
        if agent not in self._allowed:
            return action
        start = int(self.env.action_space(agent).start)
        return action if self._allowed[agent][int(action) - start] else start + self._cheapest[agent]

    def _cost(self, agent: str, cost: object) -> np.ndarray:
        """Return (limited signals,) of a reported cost."""
        row = np.asarray(cost, np.float64).reshape(-1)
        if row.size != self._count:
            raise MarlRayError(f"constraints: {self._count} limits, but the cost of {agent} has {row.size} signals")
        return row[self._signals]

    def _mask(self, infos: dict[str, Any]) -> dict[str, object]:
        """Return the infos with the masks of the living agents narrowed to affordable actions."""
        needs = {a: self._need(a, infos[a]) for a in self.env.agents if "next_costs" in infos[a]}
        needs = {agent: need for agent, need in needs.items() if np.isfinite(need).any()}  # others cannot act
        masks, cheapest = affordable(list(needs.values()), self._limits - self._spent, self._limits, self._time)
        self._allowed = dict(zip(needs, masks, strict=True))
        self._cheapest = dict(zip(needs, cheapest, strict=True))
        return infos | {
            agent: {**infos[agent], "action_mask": mask.astype(np.int8)} for agent, mask in self._allowed.items()
        }

    def _need(self, agent: str, info: dict[str, object]) -> np.ndarray:
        """Return the cost of each action and of those that must follow, (actions, limited signals).

        A masked action needs infinitely much.
        """
        space = self.env.action_space(agent)
        if not isinstance(space, spaces.Discrete):
            kind = type(space).__name__
            raise MarlRayError(f"constraints: hard_limit needs Discrete actions, but those of {agent} are {kind}")
        need = np.zeros((int(space.n), self._count))
        for key in ("next_costs", "least_cost_to_go"):
            if key in info:
                costs = np.asarray(info[key], np.float64)
                if costs.shape != need.shape and (self._count > 1 or costs.shape != need.shape[:1]):
                    expected = f"{need.shape[:1]} or {need.shape}" if self._count == 1 else str(need.shape)
                    raise MarlRayError(f"constraints: {key} of {agent} has shape {costs.shape}, expected {expected}")
                need += costs.reshape(need.shape)
        if "action_mask" in info:
            need[np.asarray(info["action_mask"]) == 0] = np.inf
        return need[:, self._signals]

    def _observe(self, observations: dict[str, object]) -> dict[str, object]:
        """Return the observations with the remaining shares behind."""
        shares = np.divide(
            self._limits - self._spent, self._limits, out=np.zeros_like(self._limits), where=self._limits > 0
        )
        shares = shares.clip(0.0, 1.0)
        levels = np.minimum(shares * REMAINING_LEVELS, REMAINING_LEVELS - 1).astype(np.int64)
        result = dict(observations)
        for agent, space in self._spaces.items():
            if agent in observations:
                row = np.asarray(observations[agent])
                if isinstance(space, spaces.Discrete):
                    row = row.reshape(1)
                tail = shares if isinstance(space, spaces.Box) else levels
                result[agent] = np.concatenate([row, tail]).astype(self._wider_spaces[agent].dtype)
        return result


def affordable(
    needs: Sequence[np.ndarray], headroom: np.ndarray, limits: np.ndarray, turn: int = 0
) -> tuple[list[np.ndarray], list[int]]:
    """Return the actions that agents which act in the same step may choose: any combination of them is affordable.

    `needs[i]`: (actions, S), agent i's cost of each action and what must follow, infinite for what it cannot do.
    `headroom`, `limits`: (S,), what is left and what there was at first. Returns (actions,) boolean masks, and each
    agent's cheapest action, which its mask always contains.

    Agents choose without knowing of each other, so the worst combination counts. First every agent's cheapest action is
    reserved, jointly affordable if anything is. What is then left over goes round the agents in order: an agent may
    choose what exceeds its reserve by no more than that, and the most it may so choose is gone for those behind it.
    The order begins with agent `turn` modulo their number; `turn` is the step, so all come first equally often. If no
    combination is affordable, every agent keeps only its own cheapest action, by share of the limits.
    """
    room = headroom + TOLERANCE
    reserve = _cheapest_joint(needs, room)
    if reserve is None:
        reserve = [int((need / np.maximum(limits, TOLERANCE)).max(1).argmin()) for need in needs]
        return [np.arange(len(need)) == cheapest for need, cheapest in zip(needs, reserve, strict=True)], reserve
    masks: list[np.ndarray] = [np.empty(0)] * len(needs)
    for need, cheapest in zip(needs, reserve, strict=True):
        room = room - need[cheapest]
    for place in range(len(needs)):
        i = (turn + place) % len(needs)
        extra = needs[i] - needs[i][reserve[i]]
        masks[i] = (extra <= room).all(1)
        masks[i][reserve[i]] = True  # whatever rounding says
        room = room - extra[masks[i]].max(0)
    return masks, reserve


def _cheapest_joint(needs: Sequence[np.ndarray], room: np.ndarray) -> list[int] | None:
    """Return one action per agent that together fit into `room` (S,), or None if none do.

    Of all combinations that fit, the returned one minimises the greatest share of any signal's room that it takes. The
    search is exact: combinations grow agent by agent, and one is dropped if another needs no more of every signal. With
    one signal a single combination remains, each agent's minimum; conflicting signals can keep many.
    """
    undominated = [_undominated_rows(need) for need in needs]
    sole = [i for i, rows in enumerate(undominated) if len(rows) == 1]
    choice = [int(rows[0]) for rows in undominated]
    for i in sole:
        room = room - needs[i][choice[i]]
    several = [i for i, rows in enumerate(undominated) if len(rows) > 1]
    if not several:
        return choice if (room >= 0).all() else None
    # Measured from each signal's least, so that totals only grow, and a choice that does not fit now never will.
    least = [needs[i].min(0) for i in several]
    room = room - np.sum(least, 0)
    totals, choices = np.zeros((1, len(room))), np.zeros((1, 0), np.int64)
    for i, low in zip(several, least, strict=True):
        totals = (totals[:, None] + (needs[i][undominated[i]] - low)).reshape(-1, len(room))
        choices = np.hstack([choices.repeat(len(undominated[i]), 0), np.tile(undominated[i], len(choices))[:, None]])
        fits = (totals <= room).all(1)
        if not fits.any():
            return None
        totals, choices = totals[fits], choices[fits]
        best = _undominated_rows(totals)
        totals, choices = totals[best], choices[best]
    least_share = (totals / np.maximum(room, TOLERANCE)).max(1).argmin()
    for i, action in zip(several, choices[least_share], strict=True):
        choice[i] = int(action)
    return choice


def _undominated_rows(rows: np.ndarray) -> np.ndarray:
    """Return the indices of the rows (n, S) that no other row is at most equal to in every column.

    Of equal rows it is the first.
    """
    if rows.shape[1] == 1:
        least: np.ndarray = rows.argmin(0)
        return least
    no_worse = (rows[:, None] <= rows).all(-1)
    first = np.arange(len(rows))[:, None] < np.arange(len(rows))
    return np.flatnonzero(~(no_worse & (~no_worse.T | first)).any(0))


def _widen_space(agent: str, space: spaces.Space[Any], extra: int) -> spaces.Space[Any]:
    """Return the observation space with `extra` entries for remaining shares."""
    match space:
        case spaces.Box() if len(space.shape) == 1:
            low, high = np.append(space.low, np.zeros(extra)), np.append(space.high, np.ones(extra))
            dtype = np.result_type(space.dtype, np.float32).type
            return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            nvec, start = np.append(space.nvec, [REMAINING_LEVELS] * extra), np.append(space.start, [0] * extra)
            return spaces.MultiDiscrete(nvec, dtype=space.dtype.type, start=start)
        case spaces.Discrete():
            return spaces.MultiDiscrete(
                [int(space.n), *[REMAINING_LEVELS] * extra], start=[int(space.start), *[0] * extra]
            )
    kind = f"{type(space).__name__} of shape {space.shape}"
    raise MarlRayError(
        f"constraints: hard_limit appends to vectors of Box, MultiDiscrete or Discrete, but {agent} observes {kind}"
    )
