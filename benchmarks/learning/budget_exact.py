"""The exact value of a policy of `budget_dag`.

Every state that an episode can reach is enumerated, and none is played. A sub-task's chance is known, so a policy's
mean return, mean cost and chance to keep a limit are sums over states. The episodes of a play would blur the
differences between good policies (0.02 of return with 4,096 episodes).
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from marl_ray.config import RunConfig
from marl_ray.envs.budget.dag import EFFORTS, TASK_COUNT, best_constant_reward, best_expected_reward
from marl_ray.envs.registry import make_env

WORKER = "worker_0"


class Worth(NamedTuple):
    """The exact values of one policy."""

    episode_return: float
    cost: float
    within: float
    """Chance that an episode costs at most the limit."""


class States:
    """Every (sub-task, spent) of an episode of one worker, in order, with what the worker then sees and may do."""

    def __init__(self, config: RunConfig, limit: float):
        """`config` names the environment, whose hard limits and masks count; `limit` is that of `Worth.within`."""
        env = make_env(config.env, config.constraints)
        self.limit = limit
        self.keys: list[tuple[int, int]] = []
        seen, allowed = [], []
        plans: dict[tuple[int, int], list[int]] = {(0, 0): []}
        ahead = [(0, 0)]
        for task, spent in ahead:  # grows while it is read, sub-task by sub-task
            plan = plans[task, spent]
            observations, infos = env.reset(seed=0)
            for effort in plan:
                observations, _, _, _, infos = env.step({WORKER: effort})
            self.keys.append((task, spent))
            seen.append(np.asarray(observations[WORKER], np.float32))
            allowed.append(np.asarray(infos[WORKER]["action_mask"]) > 0)
            for effort in np.flatnonzero(allowed[-1]).tolist():
                after = (task + 1, spent + EFFORTS[effort].cost)
                if after not in plans:
                    plans[after] = [*plan, effort]
                    ahead += [after] if task + 1 < TASK_COUNT else []
        env.close()
        self.seen, self.allowed = torch.from_numpy(np.array(seen)), torch.from_numpy(np.array(allowed))

    def worth(self, model: Any) -> Worth:
        """Return the values of an ActorCritic that draws its actions."""
        with torch.no_grad():
            outputs = model.distribution.normalize(model.actor.infer(self.seen), self.allowed)
        chances = torch.softmax(outputs.where(self.allowed, -torch.inf).double(), -1).tolist()
        reached = {(0, 0): 1.0}
        ret = cost = within = 0.0
        for (task, spent), row in zip(self.keys, chances, strict=True):
            chance_of_state = reached.get((task, spent), 0.0)
            for effort, chance in zip(EFFORTS, row, strict=True):
                share = chance_of_state * chance
                after = (task + 1, spent + effort.cost)
                reached[after] = reached.get(after, 0.0) + share
                ret, cost = ret + share * effort.success, cost + share * effort.cost
                within += share * (after[0] == TASK_COUNT and after[1] <= self.limit)
        return Worth(ret, cost, within)


def score(worth: Worth, budget: float) -> float:
    """Return 1 for the best policy within the budget, 0 for the best that always makes the same effort.

    What a cost above the budget can buy is taken off the return.
    """
    constant, optimum = best_constant_reward(budget), best_expected_reward(budget)
    bought = max(0.0, best_expected_reward(worth.cost) - optimum) if worth.cost > budget else 0.0
    return (worth.episode_return - bought - constant) / (optimum - constant)
