"""The gridworlds of the `multigrid` package as PettingZoo parallel environments.

Version 0.1.0 of the package computes the right thing slowly and cannot be seeded. `World` replaces its hot paths and
its seeding; the rest stays the package's own, and a test holds every observation, reward and end to the package's.
"""

from itertools import product
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.config.run.sections import CostConfig
from marl_ray.envs.gridworld.moves import (
    DONE,
    DOOR,
    DRAWN_STEPS,
    DROP,
    FORWARD,
    LEFT,
    PICKUP,
    RIGHT,
    STEP_OF_DIRECTION,
    TERMINATED,
    TOGGLE,
    Prices,
    WorldRules,
    X,
    Y,
    enter_cell,
    move,
    move_all,
    observe,
    price_action,
)
from marl_ray.errors import MarlRayError
from marl_ray.extensions import check_numbers

# isort: split
# After `moves`, which keeps the package quiet.
from multigrid.base import MultiGridEnv
from multigrid.core.actions import Action
from multigrid.core.agent import AgentState
from multigrid.core.constants import Color, Direction, State, Type
from multigrid.envs import CONFIGURATIONS

__all__ = ["DONE", "DROP", "FORWARD", "IDS", "LEFT", "PICKUP", "RIGHT", "TOGGLE", "Gridworld", "World"]

IDS = tuple(CONFIGURATIONS)
"""Every environment id of the package."""

MAX_TRIES = 10_000
"""Draws before an object counts as impossible to place; the package would draw for ever."""

LASTING_CELLS = [int(kind) for kind in (Type.empty, Type.wall, Type.floor, Type.goal, Type.lava)]
"""Cells that no action changes."""

FIRST_COPY = np.zeros(1, np.int64)


class World(MultiGridEnv):  # type: ignore[misc]  # multigrid has no types
    """The base behind an environment of the package, with flat observations and all randomness from `reset(seed)`.

    The package's class comes first: `type(name, (package_class, World), {})`.
    """

    def __init__(self, **kwargs: object):
        super().__init__(**kwargs)
        self.rules = WorldRules(
            bool(self.allow_agent_overlap),
            bool(self.joint_reward),
            self.success_termination_mode == "all",
            self.failure_termination_mode == "all",
        )
        self.missions = [str(self.mission_space.get(i)) for i in product(*map(range, self.mission_space.nvec))]
        self.mission, self.mission_index = self.mission_space.get([0] * len(self.mission_space.nvec)), 0
        view = self.agents[0].view_size
        categories = np.tile([len(Type), len(Color), max(len(State), len(Direction))], view * view)
        mission = [len(self.missions)] if len(self.missions) > 1 else []
        self.nvec = np.array([*categories, len(Direction), *mission])
        count = self.num_agents
        cells, states = np.zeros(self.grid.state.shape, np.int64), np.array(self.agent_states)
        self.bind(cells, states, np.zeros(count, bool), np.zeros((DRAWN_STEPS, count)))
        for agent in self.agents:
            agent.reset(self.mission)
        self.blank = self.rows.copy()
        self.has_varying_starts = False
        """True if layouts are drawn at random, or hold objects that can change; known from the first reset on."""
        self.drawn = 0
        """Steps of this episode whose action order is drawn."""

    def bind(self, grid: np.ndarray, agents: np.ndarray, ended: np.ndarray, draws: np.ndarray) -> None:
        """Keep the state in these arrays from now on; the next call is `reset`.

        `grid` (width, height, 3) and `agents` (agents, state) are int64 and C-contiguous, `ended` (agents,) says who
        had ended when the last observation was made, and `draws` (DRAWN_STEPS, agents) are the draws of the action order.
        """
        self.cells = grid
        self.rows = agents
        self.ended = ended
        self.draws = draws
        self.start: np.ndarray | None = None  # the agents at the start of every episode, if it does not vary
        states = agents.view(AgentState)
        states._view, states._carried_obj = agents, np.empty(len(agents), object)
        # The package caches the column of ends. As low bytes of that column the cache cannot be wrong.
        states._terminated = agents.view(np.bool_)[:, TERMINATED * agents.itemsize]
        self.agent_states = states
        for i, agent in enumerate(self.agents):
            agent.state = states[i]

    def reset(self, seed: int | None = None, **kwargs: Any) -> tuple[dict[int, Any], dict[int, Any]]:
        """Begin an episode. What the package returns is empty here: see `gen_obs`."""
        gymnasium.Env.reset(self, seed=seed)
        # The package draws layouts from the generator of its constructor, which reset(seed) does not touch.
        self._RandomMixin__np_random = self.np_random
        self.step_count = self.drawn = 0
        self.ended[...] = False
        if self.start is not None:
            self.rows[...] = self.start
        else:
            self._generate()
        if self.render_mode == "human":
            self.render()
        return {}, {}

    def _generate(self) -> None:
        """Draw the layout, the agents' places and the mission."""
        self.rows[...] = self.blank
        self.agent_states._carried_obj.fill(None)
        before = None if self.has_varying_starts else self.np_random.bit_generator.state
        self._gen_grid(self.width, self.height)
        self.cells[...] = self.grid.state
        self.grid.state = self.cells
        # Agents' own missions are drawn without regard to the layout; the environment's names the real target.
        self.mission_index = self.missions.index(str(self.mission))
        for number, (_, _, direction, x, y, *_) in enumerate(self.rows.tolist()):
            if not (0 <= x < self.width and 0 <= y < self.height and 0 <= direction < 4):
                raise ValueError(f"agent_{number} starts at {x, y} in direction {direction}, outside of the grid")
            cell = self.grid.get(x, y)
            if cell is not None and not cell.can_overlap():
                raise ValueError(f"agent_{number} starts at {x, y}, on a {cell.type.value}")
        if not self.has_varying_starts:
            lasting = np.isin(self.cells[..., 0], LASTING_CELLS).all()
            self.has_varying_starts = not lasting or self.np_random.bit_generator.state != before
            self.start = None if self.has_varying_starts else self.rows.copy()

    @override
    def place_obj(self, *args: object, max_tries: float = MAX_TRIES, **kwargs: object) -> tuple[int, int]:
        x, y = super().place_obj(*args, max_tries=min(max_tries, MAX_TRIES), **kwargs)
        return x, y

    def gen_obs(self) -> np.ndarray:
        """Return the row of every agent, (agents, len(nvec)) int8; the layout is `Gridworld`'s observation."""
        agent, count = self.agents[0], self.num_agents
        rows = np.empty((count, len(self.nvec)), np.int8)
        everyone, mission = np.ones((1, count), bool), np.array([self.mission_index])
        state = self.cells[None], self.rows[None], everyone, self.ended[None], mission
        observe(FIRST_COPY, *state, np.arange(count), agent.view_size, bool(agent.see_through_walls), rows[None])
        return rows

    @override
    def get_full_render(self, *args: object) -> np.ndarray:
        self.__dict__["gen_obs"] = super().gen_obs  # drawing wants the package's dictionaries
        try:
            picture: np.ndarray = super().get_full_render(*args)
            return picture
        finally:
            del self.gen_obs

    def draw(self) -> None:
        """Draw the order of the next step's actions, if it is not drawn yet.

        The draws are the package's, taken in blocks and not step by step.
        """
        if self.drawn <= self.step_count and self.num_agents > 1:
            self.np_random.random(out=self.draws)
            self.drawn = self.step_count // DRAWN_STEPS * DRAWN_STEPS + DRAWN_STEPS

    def step(self, actions: dict[int, int]) -> tuple[Any, dict[int, float], dict[int, bool], dict[int, bool], Any]:
        """Play one step. Observations and infos, which the package returns here, are empty: see `gen_obs`."""
        self.draw()
        self.step_count += 1
        rewards = self.handle_actions(actions)
        # The package observes here: changes of the agents after this are seen only at the next step.
        self.ended[...] = self.agent_states._terminated
        over = [self.step_count >= self.max_steps] * self.num_agents
        if self.render_mode == "human":
            self.render()
        return {}, rewards, dict(enumerate(self.agent_states._terminated.tolist())), dict(enumerate(over)), {}

    def handle_actions(self, actions: dict[int, int]) -> dict[int, float]:
        """Move the agents in random order, and return the rewards by agent.

        The draws and moves are exactly those of the package's method.
        """
        count, reward = self.num_agents, self._reward()
        moves, rewards = np.array([actions[i] for i in range(count)]), np.zeros(count)
        draws = self.draws[(self.step_count - 1) % DRAWN_STEPS]
        if not move_all(self.cells, self.rows, moves, draws, self.rules, reward, rewards):
            for i in draws.argsort(kind="stable").tolist():
                if not move(self.cells, self.rows, i, moves[i], self.rules, reward, rewards):
                    self._use_object(i, actions[i], rewards)
        return dict(enumerate(rewards.tolist()))

    def _use_object(self, i: int, action: int, rewards: np.ndarray) -> None:
        """Let agent i act on the object that stands before it or that it carries."""
        if action not in (FORWARD, PICKUP, DROP, TOGGLE):
            raise ValueError(f"action {action} of agent_{i} is not in Discrete({len(Action)})")
        _, _, direction, x, y, *_ = self.rows[i].tolist()
        cell = x + STEP_OF_DIRECTION[direction][0], y + STEP_OF_DIRECTION[direction][1]
        agent, object_ahead = self.agents[i], self.grid.get(*cell)
        if action == FORWARD:
            if object_ahead is not None and int(object_ahead.type) == DOOR and object_ahead.can_overlap():
                enter_cell(self.cells, self.rows, i, self.rules, self._reward(), rewards)
        elif action == PICKUP:
            if object_ahead is not None and object_ahead.can_pickup() and agent.state.carrying is None:
                agent.state.carrying = object_ahead
                self.grid.set(*cell, None)
        elif action == DROP:
            if object_ahead is None and agent.state.carrying and list(cell) not in self.rows[:, X : Y + 1].tolist():
                agent.state.carrying.cur_pos = cell
                self.grid.set(*cell, agent.state.carrying)
                agent.state.carrying = None
        elif object_ahead is not None:
            object_ahead.toggle(self, agent, cell)


class Gridworld(ParallelEnv[str, np.ndarray, int]):  # type: ignore[misc]  # PettingZoo has no types
    """A MultiGrid environment with agents `agent_0` ... `agent_{n-1}`.

    Observation: MultiDiscrete, int8. Type (11), colour (6) and state (4, also an agent's direction) of every cell of
    the 7 x 7 view, then the agent's direction (4), then the mission where it varies (BlockedUnlockPickup, 12).
    Action: Discrete(7): left, right, forward, pick up, drop, toggle, done.
    Info: `cost` if any price is set: `cost.collision` for a forward move that left the agent where it was, plus
    `cost.action` for any action but done.
    An agent that terminates leaves `agents`; its rows of that step are its last.
    """

    def __init__(self, env_id: str, cost: CostConfig | None = None, /, **kwargs: object):
        """`kwargs` go to the package's environment: `agents` (how many, default 1), `max_steps`, `render_mode`, ..."""
        package_class, defaults = CONFIGURATIONS[env_id]
        _check_kwargs(env_id, kwargs)
        for package_function in (package_class, MultiGridEnv):
            check_numbers(package_function, kwargs)
        self.world: Any = type(package_class.__name__, (package_class, World), {})(**(defaults | kwargs))
        cost = cost or CostConfig()
        self.prices = Prices(float(cost.collision), float(cost.action))
        self._priced = any(self.prices)
        self.metadata = {**package_class.metadata, "name": env_id}
        self.render_mode = self.world.render_mode
        self.possible_agents = [f"agent_{i}" for i in range(self.world.num_agents)]
        self._index = {agent: i for i, agent in enumerate(self.possible_agents)}
        self.agents: list[str] = []
        # PettingZoo wants the same space object at every call.
        nvec, agents = self.world.nvec, self.possible_agents
        self._observation_spaces = {agent: spaces.MultiDiscrete(nvec, dtype=np.int8) for agent in agents}
        self._action_spaces = {agent: spaces.Discrete(len(Action)) for agent in agents}

    @override
    def observation_space(self, agent: str) -> spaces.MultiDiscrete[Any]:
        return self._observation_spaces[agent]

    @override
    def action_space(self, agent: str) -> spaces.Discrete:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Begin an episode; the same seed gives the same layout, action order and mission."""
        self.begin(seed)
        self.agents = list(self.possible_agents)
        infos = {agent: {"cost": 0.0} if self._priced else {} for agent in self.agents}
        return dict(zip(self.agents, self.world.gen_obs(), strict=True)), infos

    def begin(self, seed: int | None = None) -> None:
        """Reset the world and nothing else, for those who keep the rest of the state themselves.

        Raises MarlRayError if the world has no room for its agents and objects.
        """
        try:
            self.world.reset(seed=seed)
        except RecursionError as error:  # the package raises it when an object finds no free cell
            raise MarlRayError(f"env.kwargs: {self.metadata['name']} has no room for its agents and objects") from error
        except (AssertionError, ValueError) as error:
            raise MarlRayError(f"env.kwargs: {self.metadata['name']} cannot start ({error})") from error

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Move every agent in `agents` once. Rewards are 1 - 0.9 t / max_steps for success, see each environment."""
        index = self._index
        moves = dict.fromkeys(range(len(index)), DONE)  # the package wants an action of the finished ones too
        for agent in self.agents:
            moves[index[agent]] = int(actions[agent])
        before = self.world.rows[:, X : Y + 1].copy() if self._priced else None
        _, all_rewards, all_terminated, all_truncated, _ = self.world.step(moves)
        rows = self.world.gen_obs()
        observations = {}
        rewards = {}
        terminated = {}
        truncated = {}
        infos = {}
        remaining = []
        for agent in self.agents:
            i = index[agent]
            observations[agent] = rows[i]
            rewards[agent] = float(all_rewards[i])
            terminated[agent] = bool(all_terminated[i])
            truncated[agent] = bool(all_truncated[i])
            infos[agent] = (
                {} if before is None else {"cost": price_action(before, self.world.rows, i, moves[i], self.prices)}
            )
            if not (terminated[agent] or truncated[agent]):
                remaining.append(agent)
        self.agents = remaining
        return observations, rewards, terminated, truncated, infos

    def render(self) -> np.ndarray | None:
        """Return a (height, width, 3) uint8 picture with `render_mode: rgb_array`, else None."""
        return self.world.render() if self.render_mode else None

    @override
    def close(self) -> None:
        self.world.close()


def _check_kwargs(env_id: str, kwargs: dict[str, object]) -> None:
    """Raise MarlRayError or ValueError for arguments that the package would accept, and overwrite or misunderstand."""
    for key in ("width", "height"):
        if key in kwargs:
            raise MarlRayError(f"env.kwargs.{key}: {env_id} has no such argument; its size or room_size sets it")
    agents = kwargs.get("agents", 1)
    if not isinstance(agents, int) or isinstance(agents, bool) or agents < 1:
        raise ValueError(f"agents={agents!r}, expected a positive integer")
    if agents == AgentState.dim:  # the package takes a column of the agents' states for one agent's state
        raise ValueError(f"agents={agents}, a number that multigrid 0.1.0 fails on")
    for key in ("success_termination_mode", "failure_termination_mode"):
        if kwargs.get(key, "any") not in ("any", "all"):
            raise ValueError(f"{key}={kwargs[key]!r}, expected 'any' or 'all'")
    if kwargs.get("render_mode") not in (None, *MultiGridEnv.metadata["render_modes"]):
        raise ValueError(f"render_mode={kwargs['render_mode']!r}, expected 'rgb_array' or 'human'")
