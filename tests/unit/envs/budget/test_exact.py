"""The value of a policy of budget_dag by enumeration: against all plans, and within the limits."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning.budget_exact import States, Worth, score
from marl_ray.config import RunConfig, load_config
from marl_ray.envs.budget.dag import EFFORTS, TASK_COUNT
from marl_ray.envs.registry import make_env
from marl_ray.policies.actor_critic.policy import ActorCritic

CONFIG = Path(__file__).parents[4] / "jobs/configs/budget_dag.yaml"


def indifferent(config: RunConfig) -> ActorCritic:
    """A policy that draws evenly from what is allowed."""
    env = make_env(config.env, config.constraints)
    model = ActorCritic(env.observation_space("worker_0"), env.action_space("worker_0"), config.team["shared"].network)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_an_indifferent_policy_is_worth_the_mean_of_all_plans():
    config = load_config(RunConfig, CONFIG, ())
    plans = np.array(list(itertools.product(range(len(EFFORTS)), repeat=TASK_COUNT)))
    costs, chances = (np.array([getattr(e, key) for e in EFFORTS])[plans].sum(1) for key in ("cost", "success"))
    worth = States(config, 30).worth(indifferent(config))
    assert worth == pytest.approx((chances.mean(), costs.mean(), (costs <= 30).mean()))


def test_no_state_breaks_a_hard_limit():
    config = load_config(RunConfig, CONFIG, ("constraints=[{budget: 30, hard_limit: 30}]",))
    assert States(config, 30).worth(indifferent(config)).within == pytest.approx(1)


def test_the_score_is_0_for_the_best_constant_and_at_most_1():
    assert score(Worth(6.4, 24, 1), 30) == pytest.approx(0)
    assert score(Worth(6.5285714, 30, 1), 30) == pytest.approx(1)
    assert score(Worth(7.6, 80, 0), 30) == pytest.approx(1)  # what lies above the budget buys nothing
