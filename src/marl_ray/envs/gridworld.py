"""The gridworlds of the `multigrid` package as PettingZoo parallel environments.

Version 0.1.0 of the package computes the right thing slowly and cannot be seeded. `_Fast` replaces its hot paths and
its seeding; the rest stays the package's own, and a test holds every observation, reward and end to the package's.
"""

import os
from itertools import product
from typing import Any

import numba
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_ray.config.run import CostConfig
from marl_ray.errors import MarlRayError

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame, which multigrid imports, greets on standard output

from multigrid.base import MultiGridEnv
from multigrid.core.actions import Action
from multigrid.core.agent import AgentState
from multigrid.core.constants import Color, Direction, State, Type
from multigrid.core.world_object import Wall
from multigrid.envs import CONFIGURATIONS
from multigrid.utils.obs import get_vis_mask

IDS = tuple(CONFIGURATIONS)
"""Every environment id of the package."""

MAX_TRIES = 10_000
"""Draws before an object counts as impossible to place; the package would draw for ever."""

# Plain integers: comparing with the package's enums costs more than the moves themselves.
LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = map(int, Action)
DIR, X, Y, TERMINATED = AgentState.DIR, AgentState.POS.start, AgentState.POS.start + 1, AgentState.TERMINATED
CARRYING = AgentState.CARRYING.start
STEP = tuple(tuple(direction.to_vec().tolist()) for direction in Direction)
WALL = tuple(map(int, Wall()))


@numba.njit(cache=True)
def _observe(grid: np.ndarray, agents: np.ndarray, view: int, see_through: bool, mission: int) -> np.ndarray:
    """Rows of all agents, (agents, view * view * 3 + 2) int8: cells as the package encodes them, direction, mission.

    `grid` is (width, height, 3), `agents` (agents, state): the package's arrays. In a view the agent stands in the
    middle of the last row and looks along falling row numbers.
    """
    count, cells = len(agents), view * view * 3
    world = grid.copy()
    for a in range(count):
        if count > 1 and not agents[a, TERMINATED]:
            world[agents[a, X], agents[a, Y]] = agents[a, :3]
    image = np.empty((count, view, view, 3), np.int8)
    for a in range(count):
        ahead_x, ahead_y = STEP[agents[a, DIR]]
        for i in range(view):
            for j in range(view):
                right, ahead = i - view // 2, view - 1 - j
                x = agents[a, X] + ahead * ahead_x - right * ahead_y
                y = agents[a, Y] + ahead * ahead_y + right * ahead_x
                inside = 0 <= x < world.shape[0] and 0 <= y < world.shape[1]
                for k in range(3):
                    image[a, i, j, k] = world[x, y, k] if inside else WALL[k]
        for k in range(3):  # an agent sees in its own place what it carries
            image[a, view // 2, view - 1, k] = agents[a, CARRYING + k]
    if not see_through:
        visible = get_vis_mask(image)
        for a, i, j in np.ndindex(visible.shape):
            if not visible[a, i, j]:
                image[a, i, j] = 0
    rows = np.empty((count, cells + 2), np.int8)
    for a in range(count):
        rows[a, :cells] = image[a].ravel()
        rows[a, cells] = agents[a, DIR]
        rows[a, cells + 1] = mission
    return rows


class _Fast(MultiGridEnv):
    """Mixin before a package environment: same dynamics, flat observations, all randomness from `reset(seed)`."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.rows = self.agent_states.view(np.ndarray)  # scalar access to the subclass is ten times slower
        self.missions = [str(self.mission_space.get(i)) for i in product(*map(range, self.mission_space.nvec))]
        view = self.agents[0].view_size
        categories = np.tile([len(Type), len(Color), max(len(State), len(Direction))], view * view)
        mission = [len(self.missions)] if len(self.missions) > 1 else []
        self.nvec = np.array([*categories, len(Direction), *mission])

    def _gen_grid(self, width: int, height: int) -> None:
        # The package draws layouts from the generator of its constructor, which reset(seed) does not touch.
        self._RandomMixin__np_random = self.np_random
        super()._gen_grid(width, height)
        # Agents' own missions are drawn without regard to the layout; the environment's names the real target.
        self.mission_index = self.missions.index(str(self.mission))

    def place_obj(self, *args: Any, max_tries: float = MAX_TRIES, **kwargs: Any) -> tuple[int, int]:
        return super().place_obj(*args, max_tries=min(max_tries, MAX_TRIES), **kwargs)

    def gen_obs(self) -> np.ndarray:
        """Row of every agent, (agents, len(nvec)) int8; the layout is `Gridworld`'s observation."""
        agent = self.agents[0]
        rows = _observe(self.grid.state, self.rows, agent.view_size, agent.see_through_walls, self.mission_index)
        return rows[:, : len(self.nvec)]

    def get_full_render(self, *args: Any) -> np.ndarray:
        self.__dict__["gen_obs"] = super().gen_obs  # drawing wants the package's dictionaries
        try:
            return super().get_full_render(*args)
        finally:
            del self.gen_obs

    def handle_actions(self, actions: dict[int, int]) -> dict[int, float]:
        """Move the agents in random order; rewards by agent. Draws and does exactly what the package's method does."""
        rewards: dict[int, float] = dict.fromkeys(range(self.num_agents), 0)
        draws = self.np_random.random(self.num_agents).tolist() if self.num_agents > 1 else [0.0]
        for i in sorted(rewards, key=draws.__getitem__):
            action = actions[i]
            _, _, direction, x, y, terminated, *_ = self.rows[i].tolist()
            if terminated or action == DONE:
                continue
            if action == LEFT:
                self.rows[i, DIR] = (direction - 1) % 4
            elif action == RIGHT:
                self.rows[i, DIR] = (direction + 1) % 4
            elif action in (FORWARD, PICKUP, DROP, TOGGLE):
                dx, dy = STEP[direction]
                self._act_on(i, action, (x + dx, y + dy), rewards)
            else:
                raise ValueError(f"action {action} of agent_{i} is not in Discrete({len(Action)})")
        return rewards

    def _act_on(self, i: int, action: int, cell: tuple[int, int], rewards: dict[int, float]) -> None:
        """Let agent i act on the cell before it."""
        agent, there = self.agents[i], self.grid.get(*cell)
        if action == FORWARD:
            if there is not None and not there.can_overlap():
                return
            if not self.allow_agent_overlap and self._agent_at(cell):
                return
            self.rows[i, X], self.rows[i, Y] = cell
            if there is not None and there.type == Type.goal:
                self.on_success(agent, rewards, {})
            if there is not None and there.type == Type.lava:
                self.on_failure(agent, rewards, {})
        elif action == PICKUP:
            if there is not None and there.can_pickup() and agent.state.carrying is None:
                agent.state.carrying = there
                self.grid.set(*cell, None)
        elif action == DROP:
            if there is None and agent.state.carrying and not self._agent_at(cell):
                agent.state.carrying.cur_pos = cell
                self.grid.set(*cell, agent.state.carrying)
                agent.state.carrying = None
        elif there is not None:
            there.toggle(self, agent, cell)

    def _agent_at(self, cell: tuple[int, int]) -> bool:
        """Whether an agent, finished ones included, stands there."""
        return list(cell) in self.rows[:, X : Y + 1].tolist()


class Gridworld(ParallelEnv[str, np.ndarray, int]):
    """A MultiGrid environment with agents `agent_0` ... `agent_{n-1}`.

    Observation: MultiDiscrete, int8. Type (11), colour (6) and state (4, also an agent's direction) of every cell of
    the 7 x 7 view, then the agent's direction (4), then the mission where it varies (BlockedUnlockPickup, 12).
    Action: Discrete(7): left, right, forward, pick up, drop, toggle, done.
    Info: `cost` if any price is set: `cost.collision` for a forward move that left the agent where it was, plus
    `cost.action` for any action but done.
    An agent that terminates leaves `agents`; its rows of that step are its last.
    """

    def __init__(self, env_id: str, cost: CostConfig | None = None, **kwargs: Any):
        """`kwargs` go to the package's environment: `agents` (how many, default 1), `max_steps`, `render_mode`, ..."""
        package_class, defaults = CONFIGURATIONS[env_id]
        _check_kwargs(kwargs)
        self._env = type(package_class.__name__, (_Fast, package_class), {})(**(defaults | kwargs))
        self._cost = cost or CostConfig()
        self._priced = bool(self._cost.collision or self._cost.action)
        self.metadata = {**package_class.metadata, "name": env_id}
        self.render_mode = self._env.render_mode
        self.possible_agents = [f"agent_{i}" for i in range(self._env.num_agents)]
        self._index = {agent: i for i, agent in enumerate(self.possible_agents)}
        self.agents: list[str] = []
        # PettingZoo wants the same space object at every call.
        nvec, agents = self._env.nvec, self.possible_agents
        self._observation_spaces = {agent: spaces.MultiDiscrete(nvec, dtype=np.int8) for agent in agents}
        self._action_spaces = {agent: spaces.Discrete(len(Action)) for agent in agents}

    def observation_space(self, agent: str) -> spaces.MultiDiscrete[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Begin an episode; the same seed gives the same layout, action order and mission."""
        try:
            rows, _ = self._env.reset(seed=seed)
        except RecursionError as error:  # what the package raises when an object finds no free cell
            raise MarlRayError(f"env.kwargs: {self.metadata['name']} has no room for its agents and objects") from error
        self.agents = list(self.possible_agents)
        infos = {agent: {"cost": 0.0} if self._priced else {} for agent in self.agents}
        return dict(zip(self.agents, rows, strict=True)), infos

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Move every agent in `agents` once. Rewards are 1 - 0.9 t / max_steps for success, see each environment."""
        index = self._index
        moves = dict.fromkeys(range(len(index)), DONE)  # the package wants an action of the finished ones too
        for agent in self.agents:
            moves[index[agent]] = int(actions[agent])
        before = self._env.rows[:, X : Y + 1].tolist() if self._cost.collision else []
        rows, all_rewards, all_terminated, all_truncated, _ = self._env.step(moves)
        infos = self._costs(moves, before) if self._priced else {agent: {} for agent in self.agents}
        observations, rewards, terminated, truncated = {}, {}, {}, {}
        left = []
        for agent in self.agents:
            i = index[agent]
            observations[agent] = rows[i]
            rewards[agent] = float(all_rewards[i])
            terminated[agent] = over = bool(all_terminated[i])
            truncated[agent] = cut = bool(all_truncated[i])
            if not (over or cut):
                left.append(agent)
        self.agents = left
        return observations, rewards, terminated, truncated, infos

    def _costs(self, moves: dict[int, int], before: list[list[int]]) -> dict[str, dict[str, Any]]:
        """Infos of the agents that moved, with their costs; `before` are all agents' positions before the step."""
        costs = {agent: self._cost.action * (moves[self._index[agent]] != DONE) for agent in self.agents}
        if self._cost.collision:
            after = self._env.rows[:, X : Y + 1].tolist()
            for agent in self.agents:
                i = self._index[agent]
                if moves[i] == FORWARD and before[i] == after[i]:
                    costs[agent] += self._cost.collision
        return {agent: {"cost": cost} for agent, cost in costs.items()}

    def render(self) -> np.ndarray | None:
        """(height, width, 3) uint8 picture with `render_mode: rgb_array`, else None."""
        return self._env.render() if self.render_mode else None

    def close(self) -> None:
        self._env.close()


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for what the package would take and misunderstand."""
    agents = kwargs.get("agents", 1)
    if not isinstance(agents, int) or agents < 1:
        raise ValueError(f"agents={agents!r}, expected a positive integer")
    if agents == AgentState.dim:  # the package takes a column of the agents' states for one agent's state
        raise ValueError(f"agents={agents}, a number that multigrid 0.1.0 fails on")
    for key in ("success_termination_mode", "failure_termination_mode"):
        if kwargs.get(key, "any") not in ("any", "all"):
            raise ValueError(f"{key}={kwargs[key]!r}, expected 'any' or 'all'")
    if kwargs.get("render_mode") not in (None, *MultiGridEnv.metadata["render_modes"]):
        raise ValueError(f"render_mode={kwargs['render_mode']!r}, expected 'rgb_array' or 'human'")
