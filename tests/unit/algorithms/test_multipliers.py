"""Multipliers and the exact penalty against slow references."""

import collections
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.algorithms.constraints.multipliers import PID, Lagrange, combine_advantages, with_settings_of
from marl_ray.algorithms.constraints.penalty import (
    constraint_violation,
    exact_penalty_weights,
    pessimistic_cost_surrogate,
)
from marl_ray.errors import MarlRayError

costs_of_a_run = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40)
budgets = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


def lagrange(budget, **settings):
    return Lagrange(
        budget, **{"value": 0.001, "lr": 0.035, "maximum": 100.0, "optimizer": "adam", "damping": 0.0, **settings}
    )


def pid(budget, **settings):
    usual = {"kp": 0.1, "ki": 0.01, "kd": 0.01, "delay": 10, "error_decay": 0.95, "cost_decay": 0.95, "integral": 0.001}
    return PID(budget, **{**usual, **settings})


def after(multiplier, costs):
    for cost in costs:
        multiplier = multiplier.with_cost(cost)
    return multiplier


@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=40), budget=budgets, lr=st.floats(0.001, 1))
def test_lagrange_equals_torch_adam_and_sgd(costs, budget, lr):
    scale = budget or 1.0
    for name, kind in (("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        value = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        optimizer = kind([value], lr=lr)
        for cost in costs:
            optimizer.zero_grad()
            (-value * (cost - budget) / scale).backward()
            optimizer.step()
            with torch.no_grad():
                value.clamp_(0, 3)
        multiplier = after(lagrange(budget, value=0.5, lr=lr, maximum=3.0, optimizer=name), costs)
        assert multiplier.multiplier == pytest.approx(value.item(), rel=1e-9, abs=1e-9)


@given(
    costs=st.lists(st.floats(0, 100), min_size=1, max_size=40),
    budget=budgets,
    kp=st.floats(0, 2),
    ki=st.floats(0, 1),
    kd=st.floats(0, 2),
    delay=st.integers(1, 12),
)
def test_pid_equals_its_equations(costs, budget, kp, ki, kd, delay):
    scale = budget or 1.0
    integral, proportional, smoothed, past = 0.001, 0.0, 0.0, collections.deque([0.0], maxlen=delay)
    multiplier = pid(budget, kp=kp, ki=ki, kd=kd, delay=delay, error_decay=0.9, cost_decay=0.8)
    for cost in costs:
        error = (cost - budget) / scale
        integral = max(0.0, integral + ki * error)
        proportional = 0.9 * proportional + 0.1 * error
        smoothed = 0.8 * smoothed + 0.2 * cost / scale
        derivative = max(0.0, smoothed - past[0])
        past.append(smoothed)
        multiplier = multiplier.with_cost(cost)
        expected = max(0.0, kp * proportional + integral + kd * derivative)
        assert multiplier.multiplier == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(costs=costs_of_a_run, budget=budgets, gain=st.floats(0, 100))
def test_multipliers_stay_finite_and_never_negative(costs, budget, gain):
    starts = [
        lagrange(budget, lr=gain),
        lagrange(budget, lr=gain, optimizer="sgd", damping=gain),
        pid(budget, kp=gain, ki=gain, kd=gain),
    ]
    for multiplier in starts:
        for cost in costs:
            multiplier = multiplier.with_cost(cost)
            assert 0 <= multiplier.multiplier < math.inf
            if isinstance(multiplier, Lagrange):
                assert multiplier.multiplier <= multiplier.maximum


@given(costs=costs_of_a_run, damping=st.floats(0, 10))
def test_damping_adds_to_the_weight_and_leaves_lambda_alone(costs, damping):
    for kind in ("adam", "sgd"):
        plain = after(lagrange(5.0, maximum=3.0, optimizer=kind), costs)
        damped = after(lagrange(5.0, maximum=3.0, optimizer=kind, damping=damping), costs)
        assert damped.value == plain.value == plain.multiplier
        expected = plain.value + damping * (costs[-1] - 5.0) / 5.0
        assert damped.multiplier == pytest.approx(min(max(expected, 0.0), 3.0))


def simulate_costs(multiplier, steps=400):
    """Costs of a policy whose logit moves by how far the multiplier is below its equilibrium, 0.05, at a budget of 30."""
    logit, costs = 2.0, []
    for _ in range(steps):
        costs.append(24 + 56 / (1 + math.exp(-logit)))
        multiplier = multiplier.with_cost(costs[-1])
        logit += 8 * (0.05 - multiplier.multiplier)
    return costs


def test_a_damped_multiplier_settles_where_an_undamped_one_circles():
    swings = [
        max(costs[200:]) - min(costs[200:])
        for costs in (
            simulate_costs(lagrange(30.0, value=0.0, lr=0.005)),
            simulate_costs(lagrange(30.0, value=0.0, lr=0.005, damping=0.2)),
            simulate_costs(pid(30.0, integral=0.0, kp=0.2, error_decay=0.0, cost_decay=0.0)),
        )
    ]
    assert swings[0] > 10 and max(swings[1:]) < 1, swings


@given(costs=costs_of_a_run, later=costs_of_a_run, budget=budgets)
def test_a_restored_multiplier_continues_bit_for_bit(costs, later, budget):
    for start in (lagrange(budget), lagrange(budget, optimizer="sgd", damping=0.2), pid(budget, delay=3)):
        saved = after(start, costs)
        restored = type(start)(**json.loads(json.dumps(vars(saved))))
        assert restored == saved
        assert after(restored, later) == after(saved, later)


def test_an_update_leaves_the_old_state_alone():
    start = pid(10.0)
    start.with_cost(20.0)
    assert start == pid(10.0)


@given(falls=st.lists(st.floats(0, 5), min_size=1, max_size=20), delay=st.integers(1, 5))
def test_pid_derivative_counts_increases_only(falls, delay):
    controller = pid(10.0, kp=0.0, ki=0.0, kd=1.0, delay=delay, integral=0.0, cost_decay=0.0)
    cost = 100.0
    for _ in range(delay + 1):
        controller = controller.with_cost(cost)
    for fall in falls:
        cost -= fall
        controller = controller.with_cost(cost)
        assert controller.multiplier == 0.0
    compared = 10.0 * controller.costs[-delay]
    assert controller.with_cost(compared + 10.0).multiplier == pytest.approx(1.0)


def test_gains_mean_the_same_for_every_budget():
    for start in (lambda d: lagrange(d, optimizer="sgd"), lagrange, pid):
        small = after(start(2.0), [3.0, 4.0, 1.0]).multiplier
        large = after(start(2000.0), [3000.0, 4000.0, 1000.0]).multiplier
        assert small == pytest.approx(large, rel=1e-9)


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_not_finite_is_refused(cost):
    for start in (lagrange(1.0), pid(1.0)):
        with pytest.raises(MarlRayError, match="finite mean episode cost"):
            start.with_cost(cost)


def test_a_multiplier_rises_over_and_falls_under_the_budget():
    for start in (lagrange(10.0), lagrange(10.0, optimizer="sgd"), pid(10.0)):
        high = after(start, [20.0] * 30)
        assert high.multiplier > start.multiplier
        assert after(high, [0.0] * 300).multiplier == 0.0


@given(
    values=st.lists(st.floats(-5, 5), min_size=9, max_size=9),
    multipliers=st.tuples(st.floats(0, 10), st.floats(0, 10)),
    rescale=st.booleans(),
)
def test_combine_equals_its_formula(values, multipliers, rescale):
    advantages, first, second = torch.tensor(values, dtype=torch.float64).reshape(3, 1, 3)
    combined = combine_advantages(advantages, torch.stack([first, second], -1), multipliers, rescale)
    for t in range(3):
        expected = values[t] - multipliers[0] * values[3 + t] - multipliers[1] * values[6 + t]
        if rescale:
            expected /= 1 + multipliers[0] + multipliers[1]
        assert combined[0, t].item() == pytest.approx(expected, abs=1e-9)


def test_combine_without_a_multiplier_is_the_advantage_and_refuses_other_shapes():
    advantages, costs = torch.randn(2, 5), torch.randn(2, 5, 1)
    assert torch.equal(combine_advantages(advantages, costs, [0.0], rescale=True), advantages)
    with pytest.raises(ValueError, match=r"^cost_advantages: expected \(B, T, 2\), got \(2, 5, 1\)$"):
        combine_advantages(advantages, costs, [0.0, 1.0], rescale=True)


@given(ratio=st.floats(0, 3), cost=st.floats(-3, 3), clip=st.floats(0.05, 0.5))
def test_pessimistic_cost_surrogate_equals_its_formula(ratio, cost, clip):
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    result = pessimistic_cost_surrogate(*(torch.tensor([x], dtype=torch.float64) for x in (ratio, cost)), clip=clip)
    assert result.item() == pytest.approx(max(ratio * cost, bounded * cost), abs=1e-12)


def test_pessimistic_cost_surrogate_stops_only_gains_already_made():
    ratio = torch.tensor([0.5, 1.5, 0.5, 1.5], requires_grad=True)
    pessimistic_cost_surrogate(ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [0.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize("kind", [lagrange, pid])
def test_new_settings_keep_everything_that_updates_moved(kind):
    moved = kind(budget=1.0)
    for cost in (3.0, 0.5, 2.0):
        moved = moved.with_cost(cost)
    start = kind(budget=1.0)
    assert {name for name in vars(moved) if vars(moved)[name] != vars(start)[name]} == set(start.STATE_FIELDS)
    fresh = kind(budget=2.0)
    expected = {name: vars(moved if name in start.STATE_FIELDS else fresh)[name] for name in vars(moved)}
    assert vars(with_settings_of(moved, fresh)) == expected


def test_micro_batches_with_the_penalty_weights_add_up_to_the_gradient_of_the_penalty():
    generator = torch.Generator().manual_seed(0)
    costs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    violations = torch.tensor([0.5, -0.9, 0.02], dtype=torch.float64)

    def surrogates(logits, part):
        return pessimistic_cost_surrogate(logits[part].exp().unsqueeze(-1), costs[part], 0.2).sum(0) / 12

    logits = (0.1 * torch.randn(12, generator=generator, dtype=torch.float64)).requires_grad_()
    everything = surrogates(logits, slice(None))
    (4.0 * (everything + violations).relu().sum()).backward()
    expected, logits.grad = logits.grad, None
    weights = exact_penalty_weights(everything, violations, 4.0)
    assert not weights.requires_grad
    assert set(weights.tolist()) == {0.0, 4.0}
    for start in range(0, 12, 5):
        (weights * surrogates(logits, slice(start, start + 5))).sum().backward()
    torch.testing.assert_close(logits.grad, expected)


def test_constraint_violation_is_per_decision():
    assert constraint_violation(12.0, 10.0, 8.0) == pytest.approx(0.25)
    assert constraint_violation(8.0, 10.0, 8.0) == pytest.approx(-0.25)
    for decisions in (0.0, -1.0, math.nan):
        with pytest.raises(MarlRayError, match="decisions per episode: expected a number above 0"):
            constraint_violation(1.0, 1.0, decisions)


def test_violation_plus_surrogate_foretells_the_cost_of_the_next_policy():
    """A one-state problem of 5 steps an episode, cost 1 for action 1: surrogate and violation share their unit."""
    old, new, budget, steps = 0.4, 0.3, 1.8, 5
    cost_advantages = torch.tensor([0.0 - old, 1.0 - old])
    probabilities, ratio = torch.tensor([1 - old, old]), torch.tensor([(1 - new) / (1 - old), new / old])
    surrogate = float((probabilities * ratio * cost_advantages).sum())
    violation = constraint_violation(steps * old, budget, steps)
    assert violation + surrogate == pytest.approx((steps * new - budget) / steps, abs=1e-6)
