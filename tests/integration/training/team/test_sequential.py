"""Policies updated one after another: the compound factor, and one budget shared by their steps."""

import numpy as np
import pytest
import torch
from toy_runs.runs import TWO_POLICIES, batch_of, short, team_of

from marl_ray.training.costs import CostStats
from marl_ray.training.single_process import process_group
from marl_ray.training.team.joint_update import update_team


@pytest.mark.parametrize("algorithm", ["happo", "macpo", "mappo_lagrangian"])
def test_the_factor_equals_the_joint_ratio(monkeypatch, algorithm):
    """The factor of the last policy is the product of the others' new over old probabilities at every step."""
    config = short(algorithm, TWO_POLICIES)
    factors: dict[str, torch.Tensor | None] = {}
    with process_group():
        team = team_of(config)
        batch = batch_of(config, team)
        for name, learner in team.learners.items():

            def noted(*arguments, name=name, update=learner.update):
                factors[name] = arguments[4]
                return update(*arguments)

            monkeypatch.setattr(learner, "update", noted)
        costs = {name: CostStats((4.5,), 3, 6.0) for name in team.learners}
        update_team(config, team, batch.trajectories, 0, 0, costs)
        first, second = sorted(factors, key=lambda name: factors[name] is not None)
        assert factors[first] is None
        data, model = batch.trajectories[first], team.models[first]
        outputs = model.distribution.normalize(model.actor.infer(data.observations.flatten(0, 1)))
        new = model.distribution.log_prob(outputs, data.actions.flatten()).reshape(data.mask.shape)
        expected = torch.where(data.mask, (new - data.log_probs).exp(), 1.0)
        torch.testing.assert_close(factors[second], expected)  # one agent per policy: rows are copies
        assert not torch.allclose(expected, torch.ones_like(expected))


def test_the_order_is_drawn_anew_and_equal_everywhere():
    from marl_ray.rollout.rng import team_order

    orders = [tuple(team_order(0, iteration, 3)) for iteration in range(40)]
    assert len(set(orders)) == 6 and orders == [tuple(team_order(0, iteration, 3)) for iteration in range(40)]
    assert np.all([sorted(order) == [0, 1, 2] for order in orders])


def test_a_step_uses_up_the_budget_of_the_next():
    """`estimate_moved_costs` estimates the episode's cost after an update from the factor and the cost advantages."""
    config = short("macpo", TWO_POLICIES)
    with process_group():
        team = team_of(config)
        data = batch_of(config, team).trajectories["first"]
        learner = team.learners["first"]
        factor = torch.ones_like(data.rewards)
        before = CostStats((4.5,), 3, 6.0)
        assert learner.estimate_moved_costs(before, data, factor, None) == before
        from marl_ray.algorithms.advantages.batch_gae import cost_advantages

        raw, _ = cost_advantages(data, learner.policy.hyper)
        shift = 6.0 * (0.1 * raw[..., 0][data.mask]).mean().item()
        after = learner.estimate_moved_costs(before, data, factor * 1.1, None)
        assert after.means == (pytest.approx(4.5 + shift, rel=1e-4),)
