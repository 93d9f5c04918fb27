"""Bundles in one pass answer as each of them does alone."""

import asyncio

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_ray.config import NetworkConfig
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.stacked import Stack, can_stack
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle, PolicyParts, save_bundle
from marl_ray.policies.bundles.loading import load_actor_critics
from marl_ray.policies.bundles.manifest import Lineage
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher

SPACES = {
    "categories": spaces.MultiDiscrete([3, 5, 2]),
    "vector": spaces.Box(-1, 1, (6,), np.float32),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
}

ACTIONS = spaces.MultiDiscrete([4, 3])


def random_bundle(
    folder,
    observation: spaces.Space,
    seed: int,
    network: NetworkConfig | None = None,
    action: spaces.Space = ACTIONS,
) -> ActorCriticBundle:
    """Random weights, two agents with a policy of their own each."""
    torch.manual_seed(seed)
    network = network or NetworkConfig(hidden=(16, 8))
    parts = {}
    for name in ("p", "q"):
        actor = ActorCritic(observation, action, network).actor
        for value in actor.parameters():
            torch.nn.init.normal_(value, std=0.5)
        parts[name] = PolicyParts(network, observation, action, actor.state_dict())
    lineage = Lineage(run="r", algorithm={}, config_hash="", code_version="", seed=seed, env={}, steps=0, metrics={})
    return load_actor_critics(save_bundle(folder, {"a": "p", "b": "q"}, parts, lineage))


def requests(bundle: ActorCriticBundle, count: int, seed: int) -> list[dict[str, np.ndarray]]:
    space = bundle.policies["p"].observation_space
    space.seed(seed)
    agents = (["a", "b"], ["b"], ["a"])
    return [
        {agent: bundle.parse_observation(agent, space.sample().tolist()) for agent in agents[i % 3]}
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", ["categories", "vector"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_stack_answers_as_each_of_its_bundles(tmp_path, kind, count):
    bundles = [random_bundle(tmp_path, SPACES[kind], seed) for seed in range(count)]
    rows = requests(bundles[0], 24, 1)
    which = np.random.default_rng(0).integers(count, size=len(rows)).tolist()
    together = Stack(bundles).act(rows, which)
    for request, place, answer in zip(rows, which, together, strict=True):
        (alone,) = bundles[place].act([request])
        assert alone.keys() == answer.keys()
        for agent, (action, log_prob) in alone.items():
            assert action.tolist() == answer[agent][0].tolist()
            assert log_prob == pytest.approx(answer[agent][1], abs=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("greedy", [True, False])
def test_actions_that_count_from_elsewhere_and_masks_are_as_alone(tmp_path, activation, greedy):
    network, action = NetworkConfig(hidden=(16, 8), activation=activation), spaces.Discrete(5, start=3)
    bundles = [random_bundle(tmp_path, SPACES["vector"], seed, network, action) for seed in range(2)]
    rows, dice = requests(bundles[0], 60, 4), np.random.default_rng(2)
    masks = [
        {a: dice.permutation([True, True, False, False, False]) for a in request if dice.random() < 0.7}
        for request in rows
    ]
    which = dice.integers(2, size=60).tolist()
    actions = Stack(bundles).act(rows, which, None if greedy else np.random.default_rng(7), masks)
    # All of them by each bundle, so that its draws come from the same numbers.
    alone = [one_bundle.act(rows, None if greedy else np.random.default_rng(7), masks) for one_bundle in bundles]
    for k, (mask, answer) in enumerate(zip(masks, actions, strict=True)):
        for agent, (taken, log_prob) in alone[which[k]][k].items():
            assert answer[agent][0] == taken and 3 <= taken < 8
            assert answer[agent][1] == pytest.approx(log_prob, abs=1e-5)
            assert agent not in mask or mask[agent][taken - 3]


def test_weights_that_are_not_finite_give_log_probabilities_that_are_none(tmp_path):
    one_bundle = random_bundle(tmp_path, SPACES["vector"], 0)
    with torch.no_grad():
        one_bundle.policies["p"].actor.rest[-1].bias[:] = np.nan
    (action,) = Stack([one_bundle]).act(requests(one_bundle, 1, 1), [0], np.random.default_rng(0))
    assert np.isnan(action["a"][1]) and np.isfinite(action["b"][1])


def test_sampling_in_a_stack_draws_from_each_bundles_own_distribution(tmp_path):
    bundles = [random_bundle(tmp_path, SPACES["categories"], seed) for seed in range(2)]
    request = requests(bundles[0], 1, 3)[0]
    answers = Stack(bundles).act([request] * 8000, [0, 1] * 4000, np.random.default_rng(0))
    for place, one_bundle in enumerate(bundles):
        alone = one_bundle.act([request] * 4000, np.random.default_rng(1))
        counts = [np.zeros((4, 3)), np.zeros((4, 3))]
        for counted, share in zip(counts, (answers[place::2], alone), strict=True):
            for answer in share:
                counted[tuple(answer["a"][0])] += 1
        assert np.abs(counts[0] - counts[1]).max() < 200


def test_what_is_built_otherwise_is_not_stacked(tmp_path):
    one_bundle = random_bundle(tmp_path, SPACES["categories"], 0)
    assert can_stack([one_bundle, random_bundle(tmp_path, SPACES["categories"], 1)])
    assert not can_stack([one_bundle, random_bundle(tmp_path, SPACES["categories"], 1, NetworkConfig(hidden=(16, 16)))])
    assert not can_stack(
        [one_bundle, random_bundle(tmp_path, SPACES["categories"], 1, NetworkConfig(hidden=(16, 8), activation="relu"))]
    )
    assert not can_stack([random_bundle(tmp_path, SPACES["image"], seed) for seed in range(2)])
    large = NetworkConfig(hidden=(256, 256))
    assert not can_stack([random_bundle(tmp_path, SPACES["vector"], seed, large) for seed in range(2)])
    with pytest.raises(ValueError, match=r"^expected bundles whose policies are built alike$"):
        Stack([one_bundle, random_bundle(tmp_path, SPACES["vector"], 1)])


def test_requests_of_two_arms_share_a_pass_and_one_that_fails_takes_no_other_with_it(tmp_path, monkeypatch):
    bundles = [random_bundle(tmp_path, SPACES["vector"], seed) for seed in range(2)]
    passes = PassBatcher(64, np.random.default_rng(0))
    arms = [ArmBatcher(one_bundle, passes) for one_bundle in bundles]
    rows = requests(bundles[0], 12, 5)
    taken = []
    act = Stack.act

    def count_and_act(self, *inputs):
        taken.append(len(inputs[0]))
        return act(self, *inputs)

    monkeypatch.setattr(Stack, "act", count_and_act)

    async def play(those):
        calls = [arms[i % 2].act(request, True) for i, request in enumerate(those)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(play(rows))
    for i, (request, answer) in enumerate(zip(rows, answers, strict=True)):
        (alone,) = bundles[i % 2].act([request])
        assert {agent: action.tolist() for agent, (action, _) in answer.items()} == {
            agent: action.tolist() for agent, (action, _) in alone.items()
        }
    assert taken == [12]
    poisoned = [*rows[:5], {"a": np.zeros(3, np.float32)}, *rows[6:]]
    results = asyncio.run(play(poisoned))
    assert [i for i, answer in enumerate(results) if isinstance(answer, Exception)] == [5]
    arms[1].close()
    assert not any(isinstance(answer, Exception) for answer in asyncio.run(play(rows)))
    assert taken == [12, 12]
