"""The PPO losses and the value normaliser against slow references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.algorithms import algorithm_of
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.algorithms.definition import PolicyLossInputs
from marl_ray.algorithms.losses.clipped_surrogate import clipped_surrogate, ppo_loss
from marl_ray.algorithms.losses.critics import clipped_value_loss
from marl_ray.config import SPECS, HyperParameters
from marl_ray.extensions import ALGORITHM

numbers = st.floats(-3, 3)


@given(
    new=numbers,
    old=numbers,
    advantage=numbers,
    low=st.floats(0.05, 0.5),
    high=st.floats(0.05, 0.9),
    dual=st.none() | st.floats(1.1, 4),
)
def test_clipped_surrogate_equals_its_formula(new, old, advantage, low, high, dual):
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    expected = -min(ratio * advantage, bounded * advantage)
    if dual is not None and advantage < 0:
        expected = min(expected, -dual * advantage)
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (ratio, advantage)]
    loss, clipped = clipped_surrogate(*tensors, low=1 - low, high=1 + high, dual_clip=dual)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert bool(clipped) == (-expected < ratio * advantage or -expected > ratio * advantage)


def test_no_gradient_where_the_clip_holds():
    new = torch.tensor([0.5, -0.5, 0.5, 2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    loss, clipped = clipped_surrogate(new.exp(), advantages, 0.8, 1.2, dual_clip=3.0)
    loss.sum().backward()
    assert clipped.tolist() == [True, True, False, True]
    assert new.grad is not None
    assert [g != 0 for g in new.grad.tolist()] == [False, False, True, False]


def test_ratio_of_distant_policies_stays_finite():
    new, old, advantage = (torch.tensor([[x]]) for x in (0.0, -1000.0, -1.0))
    batch = PolicyLossInputs(new, old, advantage, torch.ones(1, 1, dtype=torch.bool), old, torch.zeros(1, 1))
    assert torch.isfinite(ppo_loss(batch, HyperParameters()).loss).all()


@given(value=numbers, old=numbers, target=numbers)
def test_clipped_value_loss_is_the_larger_of_two_hubers(value, old, target):
    def huber(error):
        return 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5

    held = old + min(max(value - old, -0.2), 0.2)
    arguments = [torch.tensor([x], dtype=torch.float64) for x in (value, old, target)]
    expected = max(huber(value - target), huber(held - target))
    assert clipped_value_loss(*arguments, clip=0.2, huber_delta=1.0).item() == pytest.approx(expected, abs=1e-9)
    unclipped = clipped_value_loss(*arguments, clip=None, huber_delta=1.0)
    assert unclipped.item() == pytest.approx(huber(value - target), abs=1e-9)


def test_value_norm_is_unbiased_from_the_first_batch_and_inverts():
    norm = ValueNorm()
    values = torch.tensor([1.0, -2.0])
    assert norm.normalize(values).tolist() == values.tolist()
    norm = norm.add_batch(4.0, 20.0)
    assert norm.mean == pytest.approx(4.0)
    assert norm.std == pytest.approx(2.0)
    norm = norm.add_batch(0.0, 4.0)
    assert norm.mean == pytest.approx(2.0, rel=1e-4)
    torch.testing.assert_close(norm.denormalize(norm.normalize(values)), values)


def test_value_norm_has_a_floor_for_constant_returns():
    assert ValueNorm().add_batch(1.0, 1.0).std == pytest.approx(0.1)


def test_config_names_exactly_the_registered_algorithms():
    assert list(ALGORITHM.builtins) == list(SPECS) and all(
        algorithm_of(name).spec is spec for name, spec in SPECS.items()
    )
