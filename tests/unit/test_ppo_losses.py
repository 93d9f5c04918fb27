"""The PPO losses and the value normaliser against slow references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.algorithms import ALGORITHMS
from marl_ray.algorithms.ppo_losses import clipped_surrogate, clipped_value_loss
from marl_ray.algorithms.value_norm import ValueNorm
from marl_ray.config.run import AlgorithmName

numbers = st.floats(-3, 3)


@given(new=numbers, old=numbers, advantage=numbers, clip=st.floats(0.05, 0.5))
def test_clipped_surrogate_equals_its_formula(new, old, advantage, clip):
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (new, old, advantage)]
    loss, clipped = clipped_surrogate(*tensors, clip)
    assert loss.item() == pytest.approx(-min(ratio * advantage, bounded * advantage), abs=1e-9)
    assert bool(clipped) == (bounded * advantage < ratio * advantage)


def test_no_gradient_where_the_clip_holds():
    new = torch.tensor([0.5, -0.5, 0.5], requires_grad=True)
    loss, clipped = clipped_surrogate(new, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, True, False]
    assert new.grad is not None
    assert [g != 0 for g in new.grad.tolist()] == [False, False, True]


def test_ratio_of_distant_policies_stays_finite():
    loss, _ = clipped_surrogate(torch.tensor([0.0]), torch.tensor([-1000.0]), torch.tensor([-1.0]), 0.2)
    assert torch.isfinite(loss).all()


@given(value=numbers, old=numbers, target=numbers)
def test_clipped_value_loss_is_the_larger_of_two_hubers(value, old, target):
    def huber(error):
        return 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5

    held = old + min(max(value - old, -0.2), 0.2)
    arguments = [torch.tensor([x], dtype=torch.float64) for x in (value, old, target)]
    expected = max(huber(value - target), huber(held - target))
    assert clipped_value_loss(*arguments, clip=0.2, huber_delta=1.0).item() == pytest.approx(expected, abs=1e-9)
    assert clipped_value_loss(*arguments, None, 1.0).item() == pytest.approx(huber(value - target), abs=1e-9)


def test_value_norm_is_unbiased_from_the_first_batch_and_inverts():
    norm = ValueNorm()
    values = torch.tensor([1.0, -2.0])
    assert norm.normalize(values).tolist() == values.tolist()
    norm = norm.updated(4.0, 20.0)
    assert norm.mean == pytest.approx(4.0)
    assert norm.std == pytest.approx(2.0)
    norm = norm.updated(0.0, 4.0)
    assert norm.mean == pytest.approx(2.0, rel=1e-4)
    torch.testing.assert_close(norm.denormalize(norm.normalize(values)), values)


def test_value_norm_has_a_floor_for_constant_returns():
    assert ValueNorm().updated(1.0, 1.0).std == pytest.approx(0.1)


def test_config_names_exactly_the_registered_algorithms():
    assert set(AlgorithmName.__args__) == set(ALGORITHMS)
