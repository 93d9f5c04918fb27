"""The collector: one layout, right boundaries, and data that does not depend on how the copies are divided."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from toys.envs import Countdown

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import EnvConfig, NetworkConfig
from marl_ray.config.random_streams import (
    BLOCK_BITS,
    BLOCK_STEPS,
    MAX_COPIES,
    MAX_EPOCHS,
    MAX_EVALUATION_STEPS,
    MAX_REFILLS,
    ORDER_BITS,
)
from marl_ray.envs.copies import make_batch
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.spaces import joint_space
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.collector import ActorCriticCollector
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.rng import EVALUATION_START, action_noise, action_stream, episode_seed, order_stream, permutation
from marl_ray.rollout.served.collector import DATA_ORDER
from marl_ray.rollout.text.collector import TRANSCRIPT_ORDER

FIELDS = ("observations", "actions", "log_probs", "values", "bootstrap", "rewards", "costs", "mask", "terminated")


def player(critic: str = "local", agents: tuple[str, ...] = ("a", "b"), norm: ValueNorm | None = None) -> Player:
    env = Countdown()
    torch.manual_seed(0)
    observation = env.observation_space("a")
    model = ActorCritic(
        observation, spaces.Discrete(2), NetworkConfig(hidden=(8,)), critic, joint_space([observation] * 2), len(agents)
    )
    return Player(model, list(agents), norm or ValueNorm())


AGENTS = {"shared": ["a", "b"]}


def collector(
    copies: range, steps: int = 8, state=None, agents=AGENTS, seed: int = 3, plan=None, **kwargs
) -> ActorCriticCollector:
    env = EnvConfig(id="toys.envs:countdown", kwargs=kwargs)
    envs = make_batch(env, len(copies), list(agents.values()))
    return ActorCriticCollector(
        Countdown(**kwargs), envs, agents, copies, plan or CollectPlan(steps), seed, state=state
    )


@pytest.mark.parametrize("critic", ["local", "central"])
def test_data_does_not_depend_on_the_number_of_workers(critic):
    team = {"shared": player(critic)}
    together, episodes, steps = collector(range(4)).collect(team, iteration=2)
    first, early, half = collector(range(2)).collect(team, iteration=2)
    second, late, _ = collector(range(2, 4)).collect(team, iteration=2)
    assert steps == 2 * half == 32
    for field in FIELDS:
        parts = torch.cat([getattr(first["shared"], field), getattr(second["shared"], field)])
        torch.testing.assert_close(getattr(together["shared"], field), parts)
    assert sorted(episodes) == sorted(early + late)


def test_a_collector_continues_bit_for_bit_from_its_state():
    team = {"shared": player()}
    original = collector(range(3), steps=5)
    original.collect(team, 0)
    resumed = collector(range(3), steps=5, state=original.state())
    expected, episodes, _ = original.collect(team, 1)
    got, got_episodes, _ = resumed.collect(team, 1)
    for field in FIELDS:
        assert torch.equal(getattr(expected["shared"], field), getattr(got["shared"], field)), field
    assert episodes == got_episodes


def test_rows_are_copies_times_agents_and_boundaries_are_right():
    batch = collector(range(2), steps=8, length=6).collect({"shared": player()}, 0)[0]["shared"]
    assert batch.agent.tolist() == [0, 1, 0, 1]
    assert batch.group.tolist() == [0, 0, 1, 1]
    # Agent b terminates after 3 of 6 steps and is gone until the next episode; agent a is truncated after 6.
    assert batch.mask[1].tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert batch.terminated[1].nonzero().flatten().tolist() == [2]
    assert batch.truncated[0].nonzero().flatten().tolist() == [5]
    assert batch.mask[0].all()
    assert batch.costs[1, :, 0].tolist() == [1.0] * 3 + [0.5] * 3 + [1.0] * 2  # the team's
    assert (batch.observations[1, 3:6] == 0).all()
    assert (batch.observations[0, :, 0] == torch.tensor([6, 5, 4, 3, 2, 1, 6, 5])).all()


def test_bootstrap_is_the_value_of_what_would_have_followed():
    normalized = player(norm=ValueNorm().add_batch(2.0, 8.0))
    batch = collector(range(1), steps=8, length=6).collect({"shared": normalized}, 0)[0]["shared"]
    bit = int(batch.bootstrap[0].nonzero().flatten()[0])
    assert bit == 5
    after = torch.tensor([[0, 0], [0, 1]], dtype=torch.int8)
    options = normalized.value_norm.denormalize(normalized.model.critic.infer(after)).flatten()
    assert any(torch.isclose(batch.bootstrap[0, 5], option) for option in options)
    assert batch.bootstrap[0, 7] != 0
    assert batch.bootstrap[1, 2] == 0


def test_a_true_end_has_no_bootstrap():
    batch = collector(range(1), steps=6, length=6, ends=True).collect({"shared": player()}, 0)[0]["shared"]
    assert batch.terminated[0, 5]
    assert (batch.bootstrap == 0).all()


def test_log_probs_and_values_are_the_networks_own():
    central = player("central")
    batch = collector(range(2)).collect({"shared": central}, 0)[0]["shared"]
    outputs = central.model.distribution.normalize(central.model.actor.infer(batch.observations.flatten(0, 1)))
    expected = central.model.distribution.log_prob(outputs, batch.actions.flatten())
    decided = batch.mask.flatten()
    torch.testing.assert_close(batch.log_probs.flatten()[decided], expected[decided])
    values = central.model.critic.infer(batch.states.flatten(0, 1)).reshape(2, 8, 2).transpose(1, 2).reshape(4, 8)
    torch.testing.assert_close(batch.values, values)


def test_two_policies_each_get_their_own_agent():
    team = {"first": player(agents=("a",)), "second": player("central", agents=("b",))}
    batches, episodes, _ = collector(range(2), agents={"first": ["a"], "second": ["b"]}).collect(team, 0)
    assert batches["first"].mask.shape == batches["second"].mask.shape == (2, 8)
    assert batches["second"].states.shape == (2, 8, 4)
    assert all(episode.length == 6 for episode in episodes)


def test_episode_returns_are_means_over_agents():
    collected = collector(range(1), steps=4, length=4, seed=0)
    batches, episodes, _ = collected.collect({"shared": player()}, 0)
    assert episodes[0].episode_return == pytest.approx(batches["shared"].rewards.sum().item() / 2)
    assert episodes[0].costs == (pytest.approx(0.5 * (4 + 2)),)


def test_noise_belongs_to_the_copy_and_the_iteration():
    noise = action_noise(1, 5, range(6), 4, 3)
    assert np.array_equal(noise[:, 2:4], action_noise(1, 5, range(2, 4), 4, 3))
    assert not np.array_equal(noise, action_noise(1, 6, range(6), 4, 3))
    assert not np.array_equal(noise, action_noise(2, 5, range(6), 4, 3))
    assert len({episode_seed(0, copy, episode) for copy in range(50) for episode in range(50)}) == 2500
    assert sorted(permutation(0, 0, 0, 9)) == list(range(9))


def test_the_greatest_numbers_of_a_run_have_streams_of_their_own():
    iterations, copies, attempts = (-1, 0, 1, EVALUATION_START), (0, 1, MAX_COPIES - 1), (0, 1, MAX_REFILLS)
    orders = (0, 1, MAX_EPOCHS - 1, DATA_ORDER, TRANSCRIPT_ORDER, (1 << ORDER_BITS) - 1)
    streams = [action_stream(k, attempt, copy) for k in iterations for attempt in attempts for copy in copies]
    streams += [order_stream(k, order) for k in iterations for order in orders]
    assert len({stream % (1 << 64) for stream in streams}) == len(streams)
    last_block = (MAX_EVALUATION_STEPS - 1) // BLOCK_STEPS
    assert last_block < 1 << BLOCK_BITS  # at which the second set of starts begins


def test_an_episode_over_batches_and_workers_knows_its_start_and_all_its_decisions():
    team = {"first": player(agents=("a",)), "second": player(agents=("b",))}
    agents = {"first": ["a"], "second": ["b"]}
    # Batches of 4 steps; an episode has 6, in the first 3 of which agent b plays too.
    play = collector(range(2), steps=4, agents=agents)
    ended = [play.collect(team, k).episodes for k in range(2)]
    assert [first[0].start for first in ended if first] == [0]
    assert play.running_episodes == [(6, 2)] * 2
    resumed = collector(range(2), steps=4, agents=agents, state=play.state())
    for again in (play, resumed):
        episodes = again.collect(team, 2).episodes
        assert [(e.copy, e.start, e.decisions) for e in episodes] == [
            (c, 6, {"first": 6, "second": 3}) for c in range(2)
        ]
        assert again.running_episodes == [(12, 0)] * 2
    single = collector(range(2), agents=agents, plan=CollectPlan(8, has_whole_episodes=True))
    assert [(e.start, e.decisions["second"]) for e in single.collect(team, 5).episodes] == [(40, 3)] * 2
    assert single.running_episodes == []


def test_evaluations_share_no_random_number_with_training_nor_among_each_other():
    keys = [0, 1, EVALUATION_START - 1, EVALUATION_START, EVALUATION_START + 1, EVALUATION_START + (1 << 20)]
    drawn = {tuple(action_noise(5, key, [copy], 1, 2).ravel()) for key in keys for copy in (0, 1, 2)}
    assert len(drawn) == len(keys) * 3
