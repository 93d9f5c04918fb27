"""Many copies of `budget_dag`, stepped by compiled functions.

A state is a row of float64: the luck of each sub-task (`tasks`), the sub-task, and what was spent.
"""

from typing import NamedTuple

import numba
import numpy as np


class Budget(NamedTuple):
    """The constants of `budget_dag`."""

    prices: np.ndarray
    """(efforts,)."""
    successes: np.ndarray
    """(efforts,) chances."""
    workers: int
    total: float
    """The most that a team is to spend in an episode."""


@numba.njit(cache=True, nogil=True)
def step_copies(
    states: np.ndarray,
    alive: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    costs: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    budget: Budget,
) -> None:
    """Do the sub-task of every copy whose agents are alive; see `arrays.StepCopies`."""
    tasks, workers = states.shape[1] - 2, budget.workers
    for c in range(len(states)):
        if not alive[c, 0]:
            continue
        task = int(states[c, tasks])
        worker = task % workers
        effort = actions[c, worker]
        rewards[c] = states[c, task] < budget.successes[effort]
        costs[c, worker, 0] = budget.prices[effort]
        states[c, tasks] += 1
        states[c, tasks + 1] += budget.prices[effort]
        terminated[c] = task + 1 == tasks


@numba.njit(cache=True, nogil=True)
def observe(states: np.ndarray, copies: np.ndarray, agents: np.ndarray, rows: np.ndarray, budget: Budget) -> None:
    """Write observations; see `arrays.ObserveRows`. The budget that is left is in the last place, if there is one."""
    tasks = states.shape[1] - 2
    for c in copies:
        task = int(states[c, tasks])
        for k in range(len(agents)):
            row = rows[c, k]
            row[:] = 0
            if task < tasks:
                row[task] = 1
                row[tasks] = agents[k] == task % budget.workers
            if len(row) > tasks + 1:
                row[tasks + 1] = 1.0 - states[c, tasks + 1] / budget.total


@numba.njit(cache=True, nogil=True)
def allow(states: np.ndarray, masks: np.ndarray, budget: Budget) -> None:
    """Write the actions that are possible now: all for the agent whose turn it is, the first for others."""
    tasks, workers = states.shape[1] - 2, budget.workers
    masks[:] = False
    for c in range(len(states)):
        task = int(states[c, tasks])
        for i in range(workers):
            masks[c, i, 0] = True
            if task < tasks and i == task % workers:
                masks[c, i] = True
