"""Distributions, networks and spaces."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.config import NetworkConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.distributions import distribution_of
from marl_ray.policies.actor_critic.networks import OneHotLinear
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.spaces import (
    joint_space,
    row_dtype,
    row_size,
    space_from_json,
    space_to_json,
    to_row,
)

SPACES = [
    spaces.Discrete(5, start=2),
    spaces.MultiDiscrete([3, 4, 2], dtype=np.int8),
    spaces.MultiDiscrete([300, 2]),
    spaces.MultiBinary(4),
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(np.array([-np.inf, 0.0], np.float32), np.array([np.inf, 2.0], np.float32)),
    spaces.Box(0, 255, (8, 8, 3), np.uint8),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_survives_its_plain_data(space):
    assert space_from_json(space_to_json(space)) == space


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_network_reads_rows_of_every_space(space):
    model = ActorCritic(space, spaces.Discrete(3), NetworkConfig(hidden=(8, 8)))
    space.seed(0)
    rows = np.stack([to_row(space, space.sample()).reshape(-1) for _ in range(4)]).astype(row_dtype(space))
    assert rows.shape == (4, row_size(space))
    tensor = torch.from_numpy(rows)
    values, columns = model.actor.prepare(tensor)
    torch.testing.assert_close(model.actor(values, columns), model.actor.infer(tensor))


def test_unsupported_spaces_are_named():
    with pytest.raises(MarlRayError, match="Text"):
        row_dtype(spaces.Text(3))
    with pytest.raises(MarlRayError, match="Dict"):
        distribution_of(spaces.Dict({"a": spaces.Discrete(2)}))


def test_joint_space_is_categorical_only_if_all_parts_are():
    assert joint_space(SPACES[:2]) == spaces.MultiDiscrete([5, 3, 4, 2], dtype=np.int8)
    mixed = joint_space([SPACES[0], SPACES[4]])
    assert isinstance(mixed, spaces.Box)
    assert mixed.shape == (4,)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), rows=st.integers(1, 8), seed=st.integers(0, 999))
def test_one_hot_linear_equals_a_linear_layer_on_one_hot_codes(sizes, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = OneHotLinear(sizes, 3)
    torch.nn.init.normal_(layer.weight, generator=generator)
    index = torch.stack([torch.randint(n, (rows,), generator=generator) for n in sizes], 1)
    code = torch.cat([torch.nn.functional.one_hot(index[:, k], n).float() for k, n in enumerate(sizes)], 1)
    weight = layer.weight.detach().clone().requires_grad_()
    expected, upstream = code @ weight, torch.randn(rows, 3, generator=generator)
    out = layer(*layer.prepare(index))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer(index), expected)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(layer.weight.grad, weight.grad)


def test_categorical_sampling_follows_the_probabilities():
    distribution = distribution_of(spaces.MultiDiscrete([3, 2]))
    outputs = distribution.normalize(torch.tensor([0.0, 1.0, -1.0, 2.0, 0.0]).expand(20_000, -1))
    noise = torch.from_numpy(np.random.default_rng(0).random((20_000, 2)))
    actions = distribution.sample(outputs, noise)
    first = torch.bincount(actions[:, 0], minlength=3) / 20_000
    torch.testing.assert_close(first.float(), torch.tensor([0.0, 1.0, -1.0]).softmax(-1), atol=0.015, rtol=0)
    log_p = distribution.log_prob(outputs[:1], torch.tensor([[1, 0]]))
    assert log_p.item() == pytest.approx(
        (torch.tensor([0.0, 1.0, -1.0]).log_softmax(-1)[1] + torch.tensor([2.0, 0.0]).log_softmax(-1)[0]).item(),
        abs=1e-6,
    )


def test_sampling_at_the_edges_of_the_noise_stays_in_range():
    distribution = distribution_of(spaces.Discrete(3))
    noise = torch.tensor([[0.0], [1.0 - 1e-16]], dtype=torch.float64)
    assert distribution.sample(distribution.normalize(torch.zeros(2, 3)), noise).tolist() == [0, 2]


def test_gaussian_matches_torch_and_is_clipped_for_the_environment():
    distribution = distribution_of(spaces.Box(-0.5, 0.5, (2,), np.float32))
    outputs, actions = torch.tensor([[0.1, -0.2, 0.3, -1.0]]), torch.tensor([[0.4, 2.0]])
    normal = torch.distributions.Normal(outputs[:, :2], outputs[:, 2:].exp())
    torch.testing.assert_close(distribution.log_prob(outputs, actions), normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(distribution.entropy(outputs), normal.entropy().sum(-1))
    assert distribution.to_env(actions).tolist() == [[pytest.approx(0.4), 0.5]]
    sampled = distribution.sample(
        outputs.expand(5000, -1), torch.from_numpy(np.random.default_rng(1).random((5000, 2)))
    )
    torch.testing.assert_close(sampled.std(0), outputs[0, 2:].exp(), rtol=0.05, atol=0)


def test_discrete_actions_count_from_the_spaces_start():
    distribution = distribution_of(spaces.Discrete(3, start=-1))
    assert distribution.to_env(torch.tensor([0, 2])).tolist() == [-1, 1]


def test_the_entropy_of_a_uniform_policy_is_the_logarithm_of_the_actions():
    assert distribution_of(spaces.Discrete(7)).entropy(torch.full((1, 7), 1 / 7).log()).item() == pytest.approx(
        math.log(7)
    )


def test_categories_that_do_not_begin_at_zero_are_refused_where_they_would_be_misread():
    space = spaces.MultiDiscrete([3, 4], start=[1, 0])
    for refuse in (distribution_of, row_dtype, space_to_json):
        with pytest.raises(MarlRayError, match="is not supported: expected"):
            refuse(space)
