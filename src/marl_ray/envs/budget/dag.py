"""Eight sub-tasks to be paid for from one budget, and its exact solutions.

This is the smallest problem in which a soft and a hard budget have different solutions, and both are known. The
sub-tasks form a chain. The plan is fixed, and only the effort on each sub-task is chosen, as when an orchestrator picks
a model for each.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.envs.arrays import ArrayBatch
from marl_ray.errors import MarlRayError

TASK_COUNT = 8
"""Number of sub-tasks of an episode."""


class Effort(NamedTuple):
    """The cost of one way to do a sub-task, and how often it succeeds."""

    cost: int
    success: float


EFFORTS = (Effort(1, 0.6), Effort(3, 0.8), Effort(10, 0.95))

_COSTS = np.array([effort.cost for effort in EFFORTS], np.float32)
_MIN_COST, _MAX_COST = min(effort.cost for effort in EFFORTS), max(effort.cost for effort in EFFORTS)
_ALL_EFFORTS_MASK = np.ones(len(EFFORTS), np.int8)
_FIRST_EFFORT_MASK = np.eye(len(EFFORTS), dtype=np.int8)[0]


class BudgetDag(ParallelEnv[str, np.ndarray, int]):  # type: ignore[misc]  # PettingZoo has no types
    """Agents `worker_0` ... `worker_{n-1}` do the eight sub-tasks in order.

    Sub-task k is the turn of worker k % n.

    All agents live through the whole episode of eight steps, then terminate. Those whose turn it is not may only choose
    action 0, which then does nothing; so does any other action of theirs.

    Observation: Box float32, (9,) or (10,). One-hot sub-task (8, all zero at the end), own turn (0 or 1), and, if
    `observe_budget`, the budget that is left as a share of the budget (negative once overspent).
    Action: Discrete(3), an index of `EFFORTS`.
    Reward: 1 for a sub-task that succeeds, to every agent.
    Info, in the units of `EFFORTS`: `action_mask` (3,) int8; `cost` float, what the agent spent in the step;
    `next_costs` (3,) float32, the exact cost of each action in the next step; `least_cost_to_go` (3,) float32, the least
    cost of the rest of the episode after each action. An agent out of turn has zeros in the last two: the cost of the
    rest stands once, with the agent that acts, so that sums over agents are the team's.

    The budget is only observed, never enforced: `HardBudget` and the constraints of an algorithm do that.
    """

    metadata = {"name": "budget_dag", "render_modes": []}

    def __init__(self, workers: int = 1, budget: float = 30.0, observe_budget: bool = True):
        """Raise ValueError on values that make no sense.

        workers: number of agents, from 1 to 8, 1.
        budget: what an episode may cost, in the units of `EFFORTS`, 30.
        observe_budget: False leaves the budget out of observations. True by default.
        """
        if not 1 <= workers <= TASK_COUNT:
            raise ValueError(f"workers={workers}, expected 1 to {TASK_COUNT}")
        if not (budget > 0 and math.isfinite(budget)):
            raise ValueError(f"budget={budget}, expected a positive number")
        self.render_mode = None
        self.budget, self.observe_budget = budget, observe_budget
        self.possible_agents = [f"worker_{i}" for i in range(workers)]
        self.agents: list[str] = []
        low, high = np.zeros(TASK_COUNT + 2, np.float32), np.ones(TASK_COUNT + 2, np.float32)
        low[-1] = min(0.0, self._share_left(TASK_COUNT * _MAX_COST))
        size = TASK_COUNT + 1 + observe_budget
        # PettingZoo wants the same space object at every call.
        self._observation_spaces = {
            agent: spaces.Box(low[:size], high[:size], dtype=np.float32) for agent in self.possible_agents
        }
        self._action_spaces = {agent: spaces.Discrete(len(EFFORTS)) for agent in self.possible_agents}
        self._random = np.random.default_rng()

    @override
    def observation_space(self, agent: str) -> spaces.Box[Any]:
        return self._observation_spaces[agent]

    @override
    def action_space(self, agent: str) -> spaces.Discrete[Any]:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Begin an episode; the seed fixes for every sub-task which efforts would succeed."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._luck = self._random.random(TASK_COUNT).tolist()
        self._task, self._spent = 0, 0
        self.agents = list(self.possible_agents)
        costs = dict.fromkeys(self.agents, 0.0)
        return self._observe(), self._infos(costs)

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Do the current sub-task with the effort that its worker chose. Raises RuntimeError after the last one."""
        worker = self._worker()
        if worker is None:
            raise RuntimeError("expected a reset, because the episode is over")
        effort = EFFORTS[int(actions[worker])]
        reward = float(self._luck[self._task] < effort.success)
        self._spent += effort.cost
        self._task += 1
        team = self.possible_agents
        costs = dict.fromkeys(team, 0.0) | {worker: float(effort.cost)}
        over = self._task == TASK_COUNT
        result = self._observe(), dict.fromkeys(team, reward), dict.fromkeys(team, over), dict.fromkeys(team, False)
        if over:
            self.agents = []
        return *result, self._infos(costs)

    def batch(self, copies: int, groups: Sequence[Sequence[str]], signals: int) -> ArrayBatch | None:
        """Return the copies that compiled functions step together, equal to this environment step for step.

        Returns None if the environment is to report more than one cost.
        """
        if signals != 1:
            return None
        from marl_ray.envs.budget.dag_batch import Budget, allow, observe, step_copies  # loads numba

        prices, successes = np.array(EFFORTS).T.copy()
        budget = Budget(prices, successes, len(self.possible_agents), float(self.budget))

        def begin(seed: int) -> np.ndarray:
            return np.concatenate([np.random.default_rng(seed).random(TASK_COUNT), np.zeros(2)])

        return ArrayBatch(self, copies, groups, signals, begin, step_copies, observe, allow, (budget,))

    def _worker(self) -> str | None:
        """Return the agent whose turn it is; None after the last sub-task."""
        return self.possible_agents[self._task % len(self.possible_agents)] if self._task < TASK_COUNT else None

    def _share_left(self, spent: int) -> float:
        return 1.0 - spent / self.budget

    def _observe(self) -> dict[str, np.ndarray]:
        worker = self._worker()
        row = np.zeros(TASK_COUNT + 1 + self.observe_budget, np.float32)
        if worker is not None:
            row[self._task] = 1.0
        if self.observe_budget:
            row[-1] = self._share_left(self._spent)
        rows = {agent: row.copy() for agent in self.possible_agents}
        if worker is not None:
            rows[worker][TASK_COUNT] = 1.0
        return rows

    def _infos(self, costs: dict[str, float]) -> dict[str, dict[str, object]]:
        """Return the infos of all agents; every array is the receiver's own."""
        worker = self._worker()
        rest = (TASK_COUNT - self._task - 1) * _MIN_COST
        infos: dict[str, dict[str, object]] = {}
        for agent, cost in costs.items():
            has_turn = agent == worker
            infos[agent] = {
                "action_mask": (_ALL_EFFORTS_MASK if has_turn else _FIRST_EFFORT_MASK).copy(),
                "cost": cost,
                "next_costs": _COSTS.copy() if has_turn else np.zeros_like(_COSTS),
                "least_cost_to_go": np.full_like(_COSTS, rest if has_turn else 0),
            }
        return infos


def best_expected_reward(budget: float) -> float:
    """Return the greatest expected reward of any policy, mixed ones included, whose mean cost is at most `budget`.

    The linear programme max sum x_e p_e, sum x_e c_e <= budget, sum x_e = 8, x >= 0 by its dual
    min over l >= 0 of l budget + 8 max_e (p_e - l c_e), which is piecewise linear with its kinks at slopes between efforts.
    Nothing is gained by looking at what happened before: sub-tasks are independent, and so are rewards and costs.
    Raises MarlRayError if even the cheapest plan costs more.
    """
    _check_budget(budget)
    slopes = [
        (a.success - b.success) / (a.cost - b.cost) for a in EFFORTS for b in EFFORTS if a.cost > b.cost
    ]  # fmt: skip
    prices = [0.0, *(slope for slope in slopes if slope > 0)]
    return min(price * budget + TASK_COUNT * max(e.success - price * e.cost for e in EFFORTS) for price in prices)


def best_capped_reward(limit: float) -> float:
    """Return the greatest expected reward of any policy none of whose episodes costs more than `limit`.

    The reward is computed by dynamic programming over the sub-tasks left and the budget left. Raises MarlRayError if
    even the cheapest plan costs more.
    """
    _check_budget(limit)

    @cache
    def value(tasks: int, remaining: float) -> float:
        if tasks == 0:
            return 0.0
        rewards = (
            e.success + value(tasks - 1, remaining - e.cost)
            for e in EFFORTS
            if e.cost + (tasks - 1) * _MIN_COST <= remaining
        )
        return max(rewards)

    return value(TASK_COUNT, limit)


def best_constant_reward(budget: float) -> float:
    """Return the greatest expected reward of policies with one effort for all sub-tasks, at a cost within `budget`.

    A constraint algorithm must beat it to show that it spends a budget. Raises MarlRayError if even the cheapest
    plan costs more.
    """
    _check_budget(budget)
    return max(TASK_COUNT * effort.success for effort in EFFORTS if TASK_COUNT * effort.cost <= budget)


def _check_budget(budget: float) -> None:
    if not budget >= TASK_COUNT * _MIN_COST:
        raise MarlRayError(f"budget: {budget} is less than {TASK_COUNT * _MIN_COST}, the cost of the cheapest plan")
