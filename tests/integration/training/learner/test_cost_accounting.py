"""Costs and decisions of episodes, counted by episode; and controllers that move once per measurement."""

import pytest
import torch
from toy_runs.runs import TWO_POLICIES, batch_of, short, team_of

from marl_ray.algorithms.advantages.batch_gae import cost_advantages
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.algorithms.losses.kl import adaptive_coefficient
from marl_ray.config import RunConfig
from marl_ray.envs.registry import make_env
from marl_ray.rollout.actor_critic.collector import ActorCriticEpisode
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.preparation.normalizers import update_norms
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.collection import build_collector
from marl_ray.training.single_process import process_group


@pytest.mark.parametrize("team", [[], [TWO_POLICIES]])
def test_decisions_belong_to_episodes_also_where_these_outlast_a_batch(team):
    """Another collector that continues where the first one stopped counts the same."""
    run = short("ppo", "train.horizon=2", "hyper.minibatches=1", *team)
    counts = []
    with process_group():
        playing = team_of(run)
        for stops in (False, True):
            collector = build_collector(run, make_env(run.env), playing.agents, 0, 1)
            ended: list[ActorCriticEpisode] = []
            for iteration in range(12):
                ended += collector.collect(playing.players(), iteration).episodes
                if stops:
                    collector = build_collector(run, make_env(run.env), playing.agents, 0, 1, state=collector.state())
            counts.append(ended)
    assert counts[0] == counts[1] and len(counts[0]) > 4
    assert max(episode.length for episode in counts[0]) > run.train.horizon
    for episode in counts[0]:
        lengths = {"a": episode.length, "b": episode.length // 2}
        assert episode.decisions == {name: sum(map(lengths.get, agents)) for name, agents in playing.agents.items()}


def test_a_budget_is_compared_by_whole_episodes():
    """Decisions per episode are those of the episodes that ended, not the batch's over their number."""
    run = short("p3o", "train.horizon=2", "hyper.minibatches=1", "train.total_steps=96")
    with process_group():
        training = build_run(run, torch.device("cpu"))
        while not training.state.costs["shared"].episodes:
            training.step()
        assert training.state.costs["shared"].decisions > 2 * run.train.horizon
        before = training.state.costs["shared"]
        while training.state.costs["shared"].episodes:
            training.step()
        after = training.state.costs["shared"]
        assert after.decisions >= before.decisions and after.means is not None


@pytest.mark.parametrize("algorithm", ["ppo_lagrangian", "pid_lagrangian", "mappo_lagrangian"])
def test_a_multiplier_moves_once_per_measurement(algorithm):
    run = short(algorithm)
    with process_group():
        team = team_of(run)
        learner = team.learners["shared"]
        batch = batch_of(run, team)
        for stats in (CostStats((9.0,), 0, 6.0), CostStats(None, 0)):
            before = learner.state.multipliers
            learner.update(batch.trajectories["shared"], 0, 0, stats)
            assert learner.state.multipliers == before
        learner.update(batch.trajectories["shared"], 0, 1, CostStats((9.0,), 2, 6.0))
        assert learner.state.multipliers != before


def test_a_multiplier_counts_what_earlier_policies_moved_once():
    """`costs` holds it already: a policy that stands still moves its multiplier by `costs` alone."""
    run = short("mappo_lagrangian", TWO_POLICIES, "hyper.lr=1e-12")
    with process_group():
        team = team_of(run)
        learner = team.learners["second"]
        batch = batch_of(run, team)
        data = batch.trajectories["second"]
        factor = 1 + torch.rand(data.mask.shape, generator=torch.Generator().manual_seed(0))
        (expected,) = learner.state.multipliers
        for _ in range(run.hyper_of("second").epochs * run.hyper_of("second").minibatches):
            expected = expected.with_cost(5.0)
        learner.update(data, 0, 0, CostStats((5.0,), 3, 6.0), factor)
        assert learner.state.multipliers[0].value == pytest.approx(expected.value, rel=1e-5)


def test_a_joint_ratio_counts_once_for_all_agents_of_a_policy():
    run = short("macpo", "train.rollout=episodes")
    with process_group():
        team = team_of(run)
        learner = team.learners["shared"]
        data = batch_of(run, team)
        batch, agents = data.trajectories["shared"], 2
        factor = 1 + 0.1 * torch.rand(len(batch.mask) // agents, batch.mask.shape[1])
        raw, total = cost_advantages(batch, learner.policy.hyper)[0][..., 0], 0.0
        for copy in range(len(factor)):
            for t in range(factor.shape[1]):
                rows = [copy * agents + a for a in range(agents) if batch.mask[copy * agents + a, t]]
                if rows:
                    mean = sum(raw[row, t].item() for row in rows) / len(rows)
                    total += (factor[copy, t].item() - 1) * mean
        stats = CostStats((4.5,), len(factor), batch.mask.sum().item() / len(factor))
        (moved,) = learner.estimate_moved_costs(stats, batch, factor, None).means
        assert moved == pytest.approx(4.5 + total / len(factor), rel=1e-4)


def test_an_empty_batch_moves_no_normaliser():
    norms = (ValueNorm().add_batch(3.0, 10.0), ValueNorm())
    assert update_norms(norms, torch.zeros(2, 3)) == norms


def test_an_adaptive_coefficient_counts_a_row_once():
    """Minibatches by time hold a part of every row."""
    run = short("ppo", "hyper.kl_coef=0.1", "hyper.kl_target=0.01", "hyper.minibatches=4")
    with process_group():
        team = team_of(run)
        learner = team.learners["shared"]
        batch = batch_of(run, team)
        data = batch.trajectories["shared"]
        metrics = learner.update(data, 0, 0, CostStats(None, 0))
        hyper = learner.policy.hyper
        expected = adaptive_coefficient(0.1, metrics["reference_kl"], hyper.kl_target, hyper.kl_horizon, len(data.mask))
        assert learner.state.kl_coef == expected != 0.1


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("policies", [1, 2])
def test_costs_that_come_when_an_agent_is_done_are_its_own_too(ends, policies):
    """The team pays for what an agent did when others continue without it, in this batch or behind its end."""
    names = ["first", "second"][:policies]
    agents = [["quick"], ["slow"]] if policies == 2 else [["*"]]
    for horizon in (2, 1):
        run = RunConfig.model_validate(
            {
                "name": "quick",
                "algorithm": "ppo_lagrangian",
                "env": {"id": "toys.envs:QuickAgent", "kwargs": {"ends": ends}},
                "team": {name: {"agents": members} for name, members in zip(names, agents, strict=True)},
                "hyper": {"cost_gamma": 1.0, "cost_gae_lambda": 1.0},
                "constraints": [{"budget": 0.5}],
                "train": {"env_copies": 16, "horizon": horizon},
            }
        )
        with process_group():
            team = team_of(run)
            for model in team.models.values():  # a fresh critic says 0
                for parameter in model.cost_critic.parameters():
                    parameter.copy_(0.3 * torch.randn(parameter.shape))
            data = batch_of(run, team)
        batch = data.trajectories["first"]
        advantages = cost_advantages(batch, run.hyper_of("first"))[1][:, 0, 0]
        quick = batch.agent == 0 if policies == 1 else slice(None)
        slow = data.trajectories[names[-1]]
        ahead = slow.cost_bootstrap[slow.agent == policies % 2, -1, 0]
        paid = batch.actions[quick, 0].float() if horizon == 2 else 0.0
        expected = paid + (ahead if horizon == 1 or not ends else 0.0)
        assert torch.allclose(advantages[quick], expected * torch.ones(16), atol=1e-6)
        assert horizon == 2 or (ahead != 0).any()
