"""Many copies of `budget_dag`, stepped by compiled functions.

A state is a row of float64: the luck of each sub-task (`tasks`), the sub-task, and what was spent.
"""

import numba
import numpy as np


@numba.njit(cache=True)  # type: ignore[untyped-decorator]  # numba has no types
def play(
    states: np.ndarray,
    alive: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    costs: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    prices: np.ndarray,
    successes: np.ndarray,
) -> None:
    """Do the sub-task of every copy whose agents are alive; see `arrays.Play`. `prices` and `successes` are by effort."""
    tasks, workers = states.shape[1] - 2, alive.shape[1]
    for c in range(len(states)):
        if not alive[c, 0]:
            continue
        task = int(states[c, tasks])
        worker = task % workers
        effort = actions[c, worker]
        rewards[c] = states[c, task] < successes[effort]
        costs[c, worker, 0] = prices[effort]
        states[c, tasks] += 1
        states[c, tasks + 1] += prices[effort]
        terminated[c] = task + 1 == tasks


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def look(
    states: np.ndarray, copies: np.ndarray, agents: np.ndarray, rows: np.ndarray, workers: int, budget: float
) -> None:
    """Write observations; see `arrays.ObserveRows`. The budget that is left is in the last place, if there is one."""
    tasks = states.shape[1] - 2
    for c in copies:
        task = int(states[c, tasks])
        for k in range(len(agents)):
            row = rows[c, k]
            row[:] = 0
            if task < tasks:
                row[task] = 1
                row[tasks] = agents[k] == task % workers
            if len(row) > tasks + 1:
                row[tasks + 1] = 1.0 - states[c, tasks + 1] / budget


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def allow(states: np.ndarray, masks: np.ndarray) -> None:
    """Write the actions that are possible now: all for the agent whose turn it is, the first for others."""
    tasks, workers = states.shape[1] - 2, masks.shape[1]
    masks[:] = False
    for c in range(len(states)):
        task = int(states[c, tasks])
        for i in range(workers):
            masks[c, i, 0] = True
            if task < tasks and i == task % workers:
                masks[c, i] = True
