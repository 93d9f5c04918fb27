"""Batches of whole episodes: shared starts, greedy members, refilled groups, forced moves, truncated episodes."""

import numpy as np
import torch
from toys.envs import Countdown

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import EnvConfig, NetworkConfig
from marl_ray.envs.budget.dag import BudgetDag
from marl_ray.envs.copies import make_batch
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.rollout.protocol import CollectPlan

AGENTS = {"shared": ["a", "b"]}


def team(env, agents, critic="local", signals=0):
    torch.manual_seed(0)
    players = {}
    for name, members in agents.items():
        observation, action = env.observation_space(members[0]), env.action_space(members[0])
        model = ActorCritic(observation, action, NetworkConfig(hidden=(8,)), critic, None, len(members), signals)
        players[name] = Player(model, members, ValueNorm(), (ValueNorm(),) * signals)
    return players


def collector(copies: range, plan: CollectPlan, **kwargs) -> ActorCriticCollector:
    env = EnvConfig(id="toys.envs:countdown", kwargs=kwargs)
    return ActorCriticCollector(
        Countdown(**kwargs), make_batch(env, len(copies), list(AGENTS.values())), AGENTS, copies, plan, 3
    )


def test_members_of_a_group_share_their_start_and_nothing_else():
    plan = CollectPlan(8, has_whole_episodes=True, group_size=4)
    batch, episodes, steps = collector(range(8), plan).collect(team(Countdown(), AGENTS), 0)
    data = batch["shared"]
    assert data.group.tolist() == [0] * 8 + [1] * 8
    assert steps == 8 * 6 and len(episodes) == 8 and data.mask.shape == (16, 6)
    first = data.observations[:, 0].reshape(2, 4, 2, 2)
    assert (first == first[:, :1]).all() and not torch.equal(first[0], first[1])
    # A start is new in every batch, and the same on any number of workers.
    again = collector(range(8), plan).collect(team(Countdown(), AGENTS), 1).trajectories["shared"]
    assert not torch.equal(again.observations, data.observations)
    half = collector(range(4, 8), plan).collect(team(Countdown(), AGENTS), 0).trajectories["shared"]
    assert torch.equal(half.observations, data.observations[8:]) and torch.equal(half.actions, data.actions[8:])


def test_the_first_member_plays_greedily():
    plan = CollectPlan(8, has_whole_episodes=True, group_size=4, has_greedy_copies=True)
    players = team(Countdown(), AGENTS)
    data = collector(range(8), plan).collect(players, 0).trajectories["shared"]
    assert data.greedy.reshape(2, 4, 2).all(2).tolist() == [[True, False, False, False]] * 2
    model = players["shared"].model
    likely = model.distribution.mode(model.distribution.normalize(model.actor.infer(data.observations.flatten(0, 1))))
    greedy = data.greedy[:, None] & data.mask
    assert torch.equal(data.actions[greedy], likely.reshape(data.actions.shape)[greedy])
    assert not torch.equal(data.actions[data.mask], likely.reshape(data.actions.shape)[data.mask])


def test_long_episodes_are_truncated_and_valued():
    plan = CollectPlan(4, has_whole_episodes=True)
    envs = make_batch(EnvConfig(id="toys.envs:countdown", kwargs={"length": 9, "agents": ["a"]}), 2, [["a"]])
    env = Countdown(length=9, agents=("a",))
    batch, episodes, _ = ActorCriticCollector(env, envs, {"one": ["a"]}, range(2), plan, 3).collect(
        team(env, {"one": ["a"]}), 0
    )
    data = batch["one"]
    assert data.truncated[:, -1].all() and not data.terminated.any() and (data.bootstrap[:, -1] != 0).all()
    assert [episode.length for episode in episodes] == [4, 4]


def test_groups_that_teach_nothing_are_played_again_from_other_starts():
    plan = CollectPlan(8, has_whole_episodes=True, group_size=2, refills=6, refill_policies=("shared",))
    once = CollectPlan(8, has_whole_episodes=True, group_size=2)

    def uninformative(data) -> list[int]:
        scores = data.rewards.sum(1).reshape(-1, 2, 2)  # group, member, agent
        return [g for g, group in enumerate(scores) if (group[0] == group[1]).all()]

    kwargs = {"length": 2}
    players = team(Countdown(), AGENTS)
    before = collector(range(16), once, **kwargs).collect(players, 0)
    after = collector(range(16), plan, **kwargs).collect(players, 0)
    assert uninformative(before.trajectories["shared"])
    data = after.trajectories["shared"]
    assert not uninformative(data) and after.steps > before.steps and len(after.episodes) == 16
    teaching = [g for g in range(8) if g not in uninformative(before.trajectories["shared"])]
    rows = [row for g in teaching for row in range(4 * g, 4 * g + 4)]
    assert torch.equal(data.actions[rows], before.trajectories["shared"].actions[rows])
    assert data.episode.shape == (32,) and torch.isfinite(data.log_probs).all()


def test_a_forced_move_is_no_decision():
    """Workers take turns; only the one whose turn it is may choose."""
    env = BudgetDag(workers=2)
    agents = {"shared": list(env.possible_agents)}
    config = EnvConfig(id="budget_dag", kwargs={"workers": 2})
    envs = make_batch(config, 3, list(agents.values()))
    played = ActorCriticCollector(env, envs, agents, range(3), CollectPlan(8, has_whole_episodes=True), 0).collect(
        team(env, agents, signals=1), 0
    )
    data = played.trajectories["shared"]
    assert data.mask.reshape(3, 2, 8).sum(1).eq(1).all()
    assert data.action_masks.shape == (6, 8, 3) and torch.equal(data.action_masks.sum(-1) > 1, data.mask)
    assert (data.actions[~data.mask] == 0).all()
    assert (data.log_probs[~data.mask] == 0).all()
    prices = torch.tensor([1.0, 3.0, 10.0])
    spent = (prices[data.actions] * data.mask).reshape(3, 2, 8).sum((1, 2))
    assert [episode.costs[0] for episode in played.episodes] == spent.tolist()
    # A budget is the team's: every member's row has every cost.
    assert torch.equal(data.costs[0::2], data.costs[1::2])
    assert torch.equal(data.costs[0::2, :, 0].sum(1), spent)


def test_masked_actions_are_never_drawn():
    from marl_ray.policies.actor_critic.distributions import Categorical

    head = Categorical((4,), ())
    outputs = head.normalize(
        torch.tensor([[5.0, 1.0, -3.0, 9.0]]).repeat(3, 1), torch.tensor([[1, 1, 0, 0]] * 3).bool()
    )
    almost_one = np.nextafter(1.0, 0.0)
    drawn = head.sample(outputs, torch.tensor([[0.0], [0.5], [almost_one]], dtype=torch.float64))
    assert drawn.max() <= 1
    assert outputs.exp()[:, 2:].eq(0).all() and torch.isfinite(head.entropy(outputs)).all()
    only = head.normalize(torch.zeros(1, 4), torch.tensor([[0, 0, 1, 0]]).bool())
    assert head.sample(only, torch.tensor([[almost_one]])).item() == 2 and head.entropy(only).item() == 0


def test_groups_say_how_their_members_differ():
    from marl_ray.rollout.group_scores import GroupSums

    play = collector(range(8), CollectPlan(8, has_whole_episodes=True, group_size=4))
    data = play.collect(team(Countdown(), AGENTS), 0).trajectories["shared"]
    scores = data.rewards.sum(1).reshape(2, 4, 2).numpy()  # group, member, agent
    metrics = play.group_sums["shared"].metrics()
    assert metrics["group_std"] == np.mean([group.std(0).mean() for group in scores])
    assert metrics["informative_groups"] == np.mean([(np.ptp(group, axis=0) > 0).any() for group in scores])
    same, other = np.ones((3, 2)), np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 3.0]])
    assert GroupSums.from_scores([same, other]).metrics() == {
        "group_std": 0.25 * 2**0.5 * 1.0,
        "informative_groups": 0.5,
    }
    assert GroupSums.from_scores([same]) + GroupSums.from_scores([other]) == GroupSums.from_scores([same, other])
    assert GroupSums().metrics() == {}
