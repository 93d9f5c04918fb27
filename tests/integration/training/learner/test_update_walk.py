"""The parts of an update return what changes, and leave the learner as it is."""

from typing import Any

import pytest
import torch
from toy_runs.runs import batch_of, short, team_of

from marl_ray.training.costs import CostStats
from marl_ray.training.learner import trust_region_step
from marl_ray.training.learner.minibatches import BatchShare, minibatches
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.learner.preparation.prepare import prepare_batch
from marl_ray.training.learner.trained_policy import UpdateState
from marl_ray.trajectories import Trajectories

pytestmark = pytest.mark.usefixtures("alone")

COSTS = CostStats((4.5,), 3, 6.0)


def begin(algorithm: str) -> tuple[Learner, Trajectories]:
    run = short(algorithm)
    team = team_of(run)
    return team.learners["shared"], batch_of(run, team).trajectories["shared"]


def prepare(learner: Learner, batch: Trajectories) -> Any:
    policy = learner.policy
    share = BatchShare(batch.agents, batch.mask.shape[1], 0, policy.family.copy_bounds(batch, batch.agents))
    plan = [minibatches(0, 0, 0, 2, share, policy.settings.has_whole_episodes)]
    return prepare_batch(policy, learner.state, batch, share, plan, COSTS, None, "here")


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.full_tensor().flatten() for parameter in learner.policy.model.parameters()])


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_lagrangian", "p3o", "cpo", "grpo"])
def test_preparing_a_batch_changes_nothing_and_returns_the_same_again(algorithm):
    learner, batch = begin(algorithm)
    before, still = learner.state, weights(learner)
    first, state, metrics = prepare(learner, batch)
    again, same, figures = prepare(learner, batch)
    assert learner.state is before
    assert torch.equal(weights(learner), still)
    assert (state, metrics) == (same, figures)
    assert torch.equal(first.advantages, again.advantages)
    moves = learner.policy.algorithm.spec.critic != "none"
    assert (state != before) == moves


def test_a_trust_regions_step_returns_weights_and_moves_none():
    learner, batch = begin("cpo")
    prepared, _, _ = prepare(learner, batch)
    actor = learner.policy.rollout_model.actor
    before = {name: parameter.clone() for name, parameter in actor.named_parameters()}
    moved, metrics = trust_region_step.constrained_weights(learner.policy, prepared, 0.01)
    assert all(torch.equal(parameter, before[name]) for name, parameter in actor.named_parameters())
    assert metrics["trust_region_kl"] > 0
    assert any(not torch.equal(moved[name], value) for name, value in before.items())


@pytest.mark.parametrize("algorithm", ["ppo_lagrangian", "pid_lagrangian"])
def test_the_state_is_the_same_from_plain_data(algorithm):
    learner, batch = begin(algorithm)
    fresh = learner.state
    learner.update(batch, 0, 0, COSTS)
    assert learner.state != fresh == UpdateState.initial(learner.policy)
    assert fresh.from_plain(learner.state.to_plain()) == learner.state
