"""Step many copies of a gridworld in one compiled call: their states stand in shared arrays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from marl_ray.closing import Unfinished, close_all
from marl_ray.config.run.sections import EnvConfig
from marl_ray.envs.batch import BatchStep, EnvBatch, group_positions
from marl_ray.envs.gridworld.moves import DONE, DRAWN_STEPS, X, Y, observe, price_action, step_copies
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


class GridworldBatch(EnvBatch):
    """`EnvBatch` of a MultiGrid id.

    Each copy's `World` draws its layouts and plays the steps that use objects (a key, ball or box taken or dropped, a
    door or box toggled, a door passed); its memory is a part of the arrays here, where compiled code plays the rest.

    Raises MarlRayError if the environment has costs and `signals` is not 1.
    """

    def __init__(self, config: EnvConfig, copies: int, groups: Sequence[Sequence[str]], signals: int = 1):
        self.signals = signals
        with Unfinished() as unfinished:
            self.envs: list[Any] = [unfinished.keep(make_env(config)) for _ in range(copies)]
            env = self.envs[0]
            if signals != 1 and any(env.prices):
                raise MarlRayError(f"env.cost: a MultiGrid environment has one cost signal, expected {signals}")
            self.members = group_positions(env.possible_agents, groups)
            unfinished.pop_all()
        world = env.world
        self.prices, self.rules = env.prices, world.rules
        self.max_steps, self.agents = world.max_steps, world.num_agents
        self.view, self.see_through = world.agents[0].view_size, bool(world.agents[0].see_through_walls)
        shape = (copies, self.agents)
        self.alive = np.zeros(shape, bool)
        self.action_masks: list[np.ndarray | None] = [None] * len(groups)
        self.grids, self.states = np.zeros((copies, *world.cells.shape), np.int64), np.stack([world.rows] * copies)
        self.draws = np.zeros((copies, DRAWN_STEPS, self.agents))
        self.times, self.missions = np.zeros(copies, np.int64), np.zeros(copies, np.int64)
        self.observed, self.ended, self.moves = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, np.int64)
        self.all = np.arange(copies)
        for c, copy in enumerate(self.envs):
            copy.world.bind(self.grids[c], self.states[c], self.ended[c], self.draws[c])

    @override
    def reset(self, copy: int, seed: int) -> None:
        env = self.envs[copy]
        env.begin(seed)
        self.times[copy], self.missions[copy] = 0, env.world.mission_index
        self.alive[copy] = self.observed[copy] = True

    @override
    def step(self, actions: Sequence[np.ndarray]) -> BatchStep:
        for members, group_actions in zip(self.members, actions, strict=True):
            self.moves[:, members] = group_actions
        return self._play(self.all)

    @override
    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        self.reset(copy, seed)
        for choices in actions:
            for members, group_actions in zip(self.members, choices, strict=True):
                self.moves[copy, members] = group_actions
            self._play(self.all[copy : copy + 1])

    @override
    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        numbers = self.all if copies is None else np.asarray(copies, np.int64)
        state = self.grids, self.states, self.observed, self.ended, self.missions
        for members, group_rows in zip(self.members, rows, strict=True):
            observe(numbers, *state, members, self.view, self.see_through, group_rows)

    def metrics(self, copy: int) -> dict[str, float]:
        """Return an empty dict, because a gridworld reports no numbers of its own."""
        return {}

    @override
    def close(self) -> None:
        close_all(env.close for env in self.envs)

    def _play(self, copies: np.ndarray) -> BatchStep:
        """Play one step of `copies` by `moves`."""
        step = BatchStep.zeros(len(self.envs), self.agents, self.signals)
        if self.agents > 1:
            for c in copies[self.times[copies] % DRAWN_STEPS == 0]:
                world = self.envs[c].world
                world.step_count = int(self.times[c])
                world.draw()
        agent_flags = self.alive, self.observed, self.ended
        settings = self.rules, self.prices, self.max_steps
        ends = step.terminated, step.truncated
        arrays = copies, self.grids, self.states, self.moves, self.draws, self.times
        unplayed = step_copies(*arrays, *agent_flags, *settings, step.rewards, step.costs, *ends)
        for c in copies[unplayed]:
            self._play_by_objects(int(c), step)
        return step

    def _play_by_objects(self, c: int, step: BatchStep) -> None:
        """Play one step of a copy by its `World`."""
        env, alive = self.envs[c], self.alive[c].copy()
        world = env.world
        moves = np.where(alive, self.moves[c], DONE).tolist()
        before = world.rows[:, X : Y + 1].copy()
        world.step_count = int(self.times[c])
        _, rewards, terminated, truncated, _ = world.step(dict(enumerate(moves)))
        self.times[c], self.observed[c] = world.step_count, alive
        for i in np.flatnonzero(alive).tolist():
            step.rewards[c, i] = rewards[i]
            step.costs[c, i, 0] = price_action(before, world.rows, i, moves[i], self.prices)
            step.terminated[c, i] = terminated[i]
            step.truncated[c, i] = truncated[i] and not terminated[i]
            self.alive[c, i] = not (terminated[i] or truncated[i])


def compiled_batch(
    config: EnvConfig, env: "ParallelEnv", copies: int, groups: Sequence[Sequence[str]], signals: int
) -> GridworldBatch:
    """See `copies.COMPILED_BATCHES`; `env` is not needed."""
    return GridworldBatch(config, copies, groups, signals)
