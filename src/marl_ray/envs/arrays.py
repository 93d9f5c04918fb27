"""Copies of an environment as rows of one array, stepped together.

The functions that step them work on arrays, and numba may compile them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import spaces
from typing_extensions import override

from marl_ray.envs.batch import BatchStep, EnvBatch, finite_number, group_positions
from marl_ray.errors import MarlRayError

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


Begin = Callable[[int], np.ndarray]
"""A function of a seed that returns the state (S,) float64 in which an episode begins. All luck of an episode is in it:
one seed and the same actions give the same episode."""
StepCopies = Callable[..., None]
"""A function of (states, alive, actions, rewards, costs, terminated, truncated, *parameters) that moves the states (copies,
S) of the copies in which somebody is alive (copies, agents) by one step, and writes the results of the agents that are: the
fields of a `BatchStep`, which are zero before. What it writes for other agents is dropped. `actions` are (copies,
agents) int64, as the environment takes them."""
ObserveRows = Callable[..., None]
"""A function of (states, copies, agents, rows, *parameters) that writes the observation of the agent with number
`agents[k]` in the copy with number `c`, for each number of `copies`, to `rows[c, k]`."""
ReportEpisode = Callable[..., dict[str, float]]
"""A function of (state, *parameters) that returns the numbers to log of the episode that has ended in the state (S,)."""
Allow = Callable[..., None]
"""A function of (states, masks, *parameters) that makes False what is not possible now in the masks (copies, agents,
actions) bool, which are True before. `actions` is the greatest number that an agent has; no agent reads what is beyond
its own."""


class ArrayBatch(EnvBatch):
    """`EnvBatch` of three functions on arrays, for an environment whose agents have Discrete actions.

    The functions are plain NumPy, or compiled by `numba.njit(cache=True)`. An environment returns such a batch from its
    method `batch(copies, groups, signals)`, which `make_batch` calls in place of stepping copies one after another.
    """

    def __init__(
        self,
        env: "ParallelEnv",
        copies: int,
        groups: Sequence[Sequence[str]],
        signals: int,
        begin: Begin,
        step_copies: StepCopies,
        observe: ObserveRows,
        allow: Allow | None = None,
        parameters: tuple[object, ...] = (),
        report: ReportEpisode | None = None,
    ):
        """Take the agents and the sizes of their actions from `env`.

        `parameters` are the last arguments of `step_copies`, `observe`, `allow` and `report`. Raises MarlRayError if an
        action space is not Discrete.
        """
        agents = list(env.possible_agents)
        self.begin = begin
        self.step_copies = step_copies
        self.observe_rows = observe
        self.allow = allow
        self.report = report
        self.signals = signals
        self.parameters = parameters
        self.members, self.agents = group_positions(agents, groups), agents
        for agent in agents:
            if not isinstance(space := env.action_space(agent), spaces.Discrete):
                raise MarlRayError(f"action space of {agent} is {space}, expected Discrete in an ArrayBatch")
        self.first = np.array([env.action_space(agent).start for agent in agents], np.int64)
        self.last = self.first + np.array([env.action_space(agent).n for agent in agents], np.int64) - 1
        views = [env.observation_space(group[0]) for group in groups]
        self.offsets = [int(view.start) if isinstance(view, spaces.Discrete) else 0 for view in views]
        self.states = np.tile(np.asarray(begin(0), np.float64), (copies, 1))
        shape = (copies, len(agents))
        self.alive, self.observed = np.zeros(shape, bool), np.zeros(shape, bool)
        self.moves, self.all = np.zeros(shape, np.int64), np.arange(copies)
        self.counts = self.last - self.first + 1
        self.masks = None if allow is None else np.ones((*shape, int(self.counts.max())), bool)
        self.action_masks: list[np.ndarray | None] = [None] * len(groups)

    @override
    def reset(self, copy: int, seed: int) -> None:
        state = np.asarray(self.begin(seed), np.float64)
        if state.shape != self.states.shape[1:]:
            raise MarlRayError(f"the state of seed {seed} has shape {state.shape}, expected {self.states.shape[1:]}")
        self.states[copy] = state
        self.alive[copy] = self.observed[copy] = True
        self._update_masks(slice(copy, copy + 1))

    @override
    def step(self, actions: Sequence[np.ndarray]) -> BatchStep:
        for members, group_actions in zip(self.members, actions, strict=True):
            self.moves[:, members] = group_actions
        return self._step(slice(None))

    @override
    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        self.reset(copy, seed)
        for choices in actions:
            for members, group_actions in zip(self.members, choices, strict=True):
                self.moves[copy, members] = group_actions
            self._step(slice(copy, copy + 1))

    @override
    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        numbers = self.all if copies is None else np.asarray(copies, np.int64)
        for members, offset, group_rows in zip(self.members, self.offsets, rows, strict=True):
            self.observe_rows(self.states, numbers, members, group_rows, *self.parameters)
            if offset:
                group_rows[numbers] -= offset
            absent = ~self.observed[np.ix_(numbers, members)]
            if absent.any():
                group_rows[numbers] = np.where(absent[..., None], 0, group_rows[numbers])

    def metrics(self, copy: int) -> dict[str, float]:
        """Return the numbers that `report` makes of the copy's state, by name; empty without it."""
        numbers = {} if self.report is None else self.report(self.states[copy], *self.parameters)
        return {name: finite_number(value, f"metric {name}") for name, value in numbers.items()}

    def close(self) -> None:
        """Do nothing: arrays hold no resource."""

    def _step(self, copies: slice) -> BatchStep:
        """Step these copies by `moves`."""
        alive, moves = self.alive[copies], self.moves[copies]
        outside = ((moves < self.first) | (moves > self.last)) & alive
        if outside.any():
            c, i = np.argwhere(outside)[0]
            raise ValueError(f"action {moves[c, i]} of {self.agents[i]} is not in {self.first[i]} to {self.last[i]}")
        step = BatchStep.zeros(len(alive), len(self.agents), self.signals)
        self.step_copies(self.states[copies], alive, moves, *step, *self.parameters)
        if not alive.all():
            for results in step:
                results[~alive] = 0
        playing = alive.any(1, keepdims=True)
        self.observed[copies] = np.where(playing, alive, self.observed[copies])
        np.logical_and(step.truncated, ~step.terminated, out=step.truncated)
        alive &= ~(step.terminated | step.truncated)
        self._update_masks(copies)
        return step

    def _update_masks(self, copies: slice) -> None:
        """Note the actions that are possible next; all are for agents that do not act."""
        if self.allow is None or self.masks is None:
            return
        masks = self.masks[copies]
        masks[...] = True
        self.allow(self.states[copies], masks, *self.parameters)
        masks |= ~self.alive[copies][..., None]
        self.share_masks()

    def share_masks(self) -> None:
        """Hand `masks` out by group. Raises MarlRayError if an agent has no action."""
        if self.masks is None:
            return
        for group, members in enumerate(self.members):
            group_masks = self.action_masks[group] = self.masks[:, members, : self.counts[members[0]]]
            if not (possible := group_masks.any(-1)).all():
                agent = self.agents[members[np.argwhere(~possible)[0, 1]]]
                raise MarlRayError(f"action mask of {agent}: expected at least one action that is possible")
