"""The constrained trust-region step: against brute force, a general solver and steps known by hand; its line search."""

import collections
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from marl_ray.algorithms.constraints.trust_region import (
    backtracking_line_search,
    constrained_step,
    fisher_product,
    flatten,
    head_kl,
    unflatten,
)
from marl_ray.errors import MarlRayError


def random_problem(generator, constraints):
    """H (D, D), g (D,), B (K, D), c (K,) and delta, with c on the scale of what the trust region can reach."""
    size = int(generator.integers(2, 5))
    factor = generator.normal(size=(size, size))
    h = factor @ factor.T + 10 ** generator.uniform(-2, 0) * np.eye(size)
    g, b = generator.normal(size=size), generator.normal(size=(constraints, size))
    g, b = g * 10 ** generator.uniform(-3, 3), b * 10 ** generator.uniform(-3, 3, size=(constraints, 1))
    delta = 10 ** generator.uniform(-4, 0)
    reach = np.sqrt(2 * delta * np.einsum("ki,ij,kj->k", b, np.linalg.inv(h), b))
    return h, g, b, generator.uniform(-1.6, 1.6, size=constraints) * reach, delta


def solve(problem, **options):
    h, g, b, c, delta = problem
    matrix, gradient, rows, violations = (torch.as_tensor(x, dtype=torch.float64) for x in (h, g, b, c))
    return constrained_step(gradient, rows, violations, delta, lambda x: matrix @ x, **options)


def whiten(problem):
    """Gradient and constraints in coordinates z where the trust region is the unit ball, constraint rows of length 1."""
    h, g, b, c, delta = problem
    back = math.sqrt(2 * delta) * np.linalg.inv(np.linalg.cholesky(h)).T
    rows = b @ back
    scale = np.linalg.norm(rows, axis=1)
    return back, g @ back / np.linalg.norm(g @ back), rows / scale[:, None], c / scale


def sampled_optimum(objectives, size, generator, rounds=40, samples=96):
    """Smallest objective over the unit ball for P problems at once, by search in shrinking neighbourhoods.

    `objectives` maps points (P, M, size) to (P, M), infinite where a point is not allowed; returns values (P,).
    """
    best = generator.normal(size=(objectives.problems, 20 * samples, size))
    lengths = np.linalg.norm(best, axis=-1, keepdims=True)
    half = best.shape[1] // 2
    best[:, :half] /= lengths[:, :half]
    best[:, half:] *= generator.uniform(size=lengths[:, half:].shape) ** (1 / size) / lengths[:, half:]
    values = objectives.values_at(best)
    chosen = values.argmin(1)
    every = np.arange(objectives.problems)
    point, value = best[every, chosen], values[every, chosen]
    for round_ in range(rounds):
        moved = point[:, None] + 0.75**round_ * generator.normal(size=(objectives.problems, samples, size))
        moved /= np.maximum(1, np.linalg.norm(moved, axis=-1, keepdims=True))
        values = objectives.values_at(moved)
        chosen = values.argmin(1)
        better = values[every, chosen] < value
        point[better], value[better] = moved[every, chosen][better], values[every, chosen][better]
    return value


class Objective(NamedTuple):
    """Linear objectives (P, size) under constraints (P, K, size) and (P, K); without g, the largest violation."""

    g: np.ndarray | None
    b: np.ndarray
    c: np.ndarray

    @property
    def problems(self):
        return len(self.b)

    def values_at(self, points):
        violations = (points @ self.b.transpose(0, 2, 1) + self.c[:, None]).max(-1)
        if self.g is None:
            return violations
        return np.where(violations <= 0, (points @ self.g[..., None])[..., 0], np.inf)


def group_problems(constraints, count, seed):
    """Random problems with their solutions and whitened forms, by dimension."""
    generator = np.random.default_rng(seed)
    groups = collections.defaultdict(list)
    for _ in range(count):
        problem = random_problem(generator, constraints)
        solution = solve(problem, tolerance=1e-24)
        groups[len(problem[1])].append((problem, solution, whiten(problem)))
    return groups


@pytest.mark.parametrize(("constraints", "count"), [pytest.param(1, 700, marks=pytest.mark.long), (2, 600)])
def test_no_random_problem_is_solved_worse_than_by_brute_force(constraints, count):
    seen: collections.Counter[tuple[str, bool]] = collections.Counter()
    for size, group in group_problems(constraints, count, seed=constraints).items():
        generator = np.random.default_rng(size)
        for recovers in (True, False):  # each half has a question of its own
            half = [each for each in group if (each[1].case == "recovery") == recovers]
            g, b, c = (np.stack([white[k] for *_, white in half]) for k in (1, 2, 3))
            best = sampled_optimum(Objective(None if recovers else g, b, c), size, generator)
            for n, ((h, *_, delta), solution, (back, *_)) in enumerate(half):
                step = solution.step.numpy()
                assert 0.5 * step @ h @ step <= delta * (1 + 1e-6)
                z = np.linalg.solve(back, step)
                seen[solution.case, bool((c[n] > 0).any())] += 1
                if recovers:
                    assert best[n] > -1e-6  # the least violation
                    np.testing.assert_allclose(z, -b[n, c[n].argmax()], atol=1e-6)
                else:
                    assert (b[n] @ z + c[n]).max() <= 1e-6
                    assert g[n] @ z <= best[n] + 1e-6
                    assert (solution.case == "unconstrained") == (max(solution.multipliers) == 0)
    assert set(seen) == {("unconstrained", False), ("unconstrained", True), ("constrained", False)} | {
        ("constrained", True),
        ("recovery", True),
    }
    assert min(seen.values()) > 30


@pytest.mark.parametrize("constraints", [1, 2, 3])
def test_the_step_reaches_the_optimum_of_a_general_solver_and_its_conditions(constraints):
    for group in group_problems(constraints, 60, seed=10 + constraints).values():
        for (h, g, b, c, _), solution, (back, g_white, b_white, c_white) in group:
            if solution.case == "recovery":
                continue
            z = np.linalg.solve(back, solution.step.numpy())
            reference = minimize(
                lambda x, g=g_white: g @ x,
                z + 0.1 * np.random.default_rng(0).normal(size=len(z)),
                jac=lambda x, g=g_white: g,
                method="SLSQP",
                constraints=[
                    {"type": "ineq", "fun": lambda x, b=b_white, c=c_white: -(b @ x + c)},
                    {"type": "ineq", "fun": lambda x: 1 - x @ x},
                ],
                options={"ftol": 1e-12, "maxiter": 200},
            )
            if (
                reference.success
                and (b_white @ reference.x + c_white).max() < 1e-8
                and reference.x @ reference.x < 1.00001
            ):
                assert g_white @ z == pytest.approx(reference.fun, abs=1e-4)
            # Karush-Kuhn-Tucker: g + B'nu + lambda H x = 0, and nu only where the constraint binds.
            stationary = g + np.array(solution.multipliers) @ b + solution.trust_multiplier * h @ solution.step.numpy()
            assert np.abs(stationary).max() < 1e-6 * np.abs(g).max()
            slack = b @ solution.step.numpy() + c
            assert np.abs(np.array(solution.multipliers) * slack).max() < 1e-6 * max(1, np.abs(g).max())


def identity(x):
    return x


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("g", "b", "c", "expected", "case"),
    [
        ((1, 0), [(1, 1)], [-100], (-1, 0), "unconstrained"),  # the constraint is out of reach
        ((1, 0), [(-1, 0)], [0], (0, 0), "constrained"),  # every gain costs
        ((1, 0), [(-1, 0)], [0.5], (0.5, 0), "constrained"),  # reward must be given up
        ((1, 0), [(0, 1)], [0], (-1, 0), "unconstrained"),  # orthogonal
        ((0, 0), [(0, 2)], [-1], (0, 0), "unconstrained"),  # no reward gradient, within the budget
        ((0, 0), [(0, 2)], [1], (0, -0.5), "constrained"),  # no reward gradient, over the budget
        ((1, 0), [(0, 2)], [4], (0, -1), "recovery"),
        ((2, 0), [(0, 0)], [-1], (-1, 0), "unconstrained"),  # no cost gradient
        ((2, 0), [(0, 0)], [1], (-1, 0), "unconstrained"),  # over the budget, with nothing to be done
        ((0, 0), [(0, 0)], [1], (0, 0), "unconstrained"),
        ((1, 0), [(-1, 0), (-1, 0)], [0.5, 0.5], (0.5, 0), "constrained"),  # twice the same constraint
        ((1, 0), [(0, 1), (0, -1)], [0.5, -0.5], (-(0.75**0.5), -0.5), "constrained"),  # an equality
        ((1, 0), [(0, 1), (0, -1)], [0.5, 0.7], (0, 1), "recovery"),  # contradictory: the worse first
        ((1, 0), [(1, 0), (0, 1)], [0, 0], (-1, 0), "unconstrained"),
        ((1, 1), [(-1, 0), (0, -1)], [0, 0.5], (0, 0.5), "constrained"),  # a corner
    ],
)
def test_steps_known_by_hand(g, b, c, expected, case):
    rows = torch.tensor(b, dtype=torch.float64)
    solution = constrained_step(vector(*g), rows, vector(*c), 0.5, identity)
    assert solution.case == case
    assert solution.step.tolist() == pytest.approx(expected, abs=1e-9)
    assert len(solution.multipliers) == len(b)
    assert min(solution.multipliers) >= 0


def test_without_constraints_the_step_is_that_of_trpo():
    h = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    g = torch.tensor([3.0, -1.0])
    solution = constrained_step(g, torch.zeros(0, 2), torch.zeros(0), 0.01, lambda x: h @ x)
    natural = torch.linalg.solve(h, g)
    torch.testing.assert_close(solution.step, -math.sqrt(0.02 / float(g @ natural)) * natural, rtol=1e-4, atol=1e-6)
    assert solution.multipliers == ()


def test_a_cut_short_solve_in_float32_stays_in_the_trust_region_and_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        factor = torch.randn(60, 60, generator=generator) * 10 ** (-3 * torch.rand(60, 1, generator=generator))
        h = factor @ factor.T + 0.01 * torch.eye(60)
        g, b = torch.randn(60, generator=generator), torch.randn(2, 60, generator=generator)
        violations = torch.tensor([-0.01, -0.02])
        solution = constrained_step(g, b, violations, 0.01, lambda x, h=h: h @ x, iterations=5)
        assert 0.5 * float(solution.step @ h @ solution.step) <= 0.01 * (1 + 1e-4)
        assert bool((b @ solution.step + violations <= 1e-4).all())
        assert float(g @ solution.step) < 0


def test_gradients_that_are_not_finite_end_at_the_old_weights():
    old = torch.tensor([1.0, 2.0])
    solution = constrained_step(torch.tensor([math.nan, 1.0]), torch.ones(1, 2), torch.zeros(1), 0.1, identity)
    taken = backtracking_line_search(lambda x: (float(x.sum()), [0.0], 0.0), old, solution.step, [0.0], 0.1)
    assert taken.vector is old
    assert taken.accepted is None


def test_too_many_constraints_are_refused():
    with pytest.raises(MarlRayError, match=r"^constraints: expected at most 8, got 9$"):
        constrained_step(torch.ones(2), torch.ones(9, 2), torch.ones(9), 0.1, identity)


@given(
    loss=st.floats(-1, 1),
    cost=st.floats(-1, 1),
    kl=st.floats(0, 0.1),
    violation=st.floats(-0.5, 0.5),
    bad=st.integers(0, 6),
)
def test_backtracking_takes_the_first_candidate_that_keeps_its_promises(loss, cost, kl, violation, bad):
    """On a line where the loss is quadratic and the first `bad` candidates give NaN."""
    lengths = [0.5**j for j in range(6)]

    def at(length):
        return 3 + loss * length + 0.3 * length**2, 5 + cost * length, kl * length**2

    visited = []

    def evaluate(x):
        length = float(x[0])
        new_loss, new_cost, divergence = at(length)
        visited.append(length)
        return (math.nan if 0 < len(visited) - 1 <= bad else new_loss), [new_cost], divergence

    expected = None
    for j, length in enumerate(lengths):
        change, rise, divergence = at(length)[0] - at(0)[0], at(length)[1] - at(0)[1], at(length)[2]
        keeps = divergence <= 0.01 and rise <= max(-violation, 0) and (change <= 0 or violation > 0)
        if j >= bad and keeps:
            expected = j
            break
    old = torch.zeros(1, dtype=torch.float64)
    accepted = backtracking_line_search(evaluate, old, torch.ones(1, dtype=torch.float64), [violation], 0.01, 0.5, 6)
    assert accepted.accepted == expected
    if expected is None:
        assert accepted.vector is old
        assert old.tolist() == [0.0]
        assert (accepted.kl, accepted.loss_change, accepted.cost_changes) == (0.0, 0.0, (0.0,))
    else:
        assert accepted.vector.tolist() == [lengths[expected]]
        assert accepted.kl == at(lengths[expected])[2]


@pytest.mark.parametrize("broken", ["loss", "cost", "kl"])
def test_backtracking_rejects_whatever_is_not_finite(broken):
    def evaluate(x):
        moved = bool(x.any())
        worst = {"loss": -math.inf, "cost": -math.inf, "kl": -math.inf}
        values = {name: worst[name] if moved and name == broken else 0.0 for name in worst}
        return values["loss"], [values["cost"]], values["kl"]

    old = torch.zeros(3)
    assert backtracking_line_search(evaluate, old, torch.ones(3), [0.0], 0.01).vector is old


def test_steps_lower_a_real_cost_to_its_budget():
    """A three-armed bandit: start over the budget, recover, then earn all the reward that the budget buys."""
    rewards, costs, budget = vector(0.0, 0.2, 2.0), vector(0.0, 1.0, 4.0), 1.0
    logits = {"logits": vector(0.0, 0.0, 3.0)}

    def function(p):
        return p["logits"].log_softmax(-1).unsqueeze(0)

    cases = []
    for _ in range(60):
        flat, start = flatten(logits), function(logits)
        p = start.exp()[0]
        mean_cost = float(p @ costs)

        def evaluate(x, start=start, like=logits):
            new = function(unflatten(x, like))
            kl = head_kl(start, new, (3,))
            return float(-(new.exp() @ rewards)), [float(new.exp() @ costs)], float(kl)

        fisher = fisher_product(function, logits, torch.ones(1, dtype=torch.float64), (3,))
        gradients = [p * (x - p @ x) for x in (-rewards, costs)]
        solution = constrained_step(
            gradients[0], gradients[1][None], vector(mean_cost - budget), 0.02, lambda x, f=fisher: f(x) + 1e-4 * x
        )
        cases.append(solution.case)
        accepted = backtracking_line_search(evaluate, flat, solution.step, [mean_cost - budget], 0.02)
        logits = unflatten(accepted.vector, logits)
    p = function(logits).exp()[0]
    assert cases[0] == "recovery"
    assert cases[-1] == "constrained"
    assert float(p @ costs) <= budget + 1e-6
    assert 0.49 < float(p @ rewards) <= 0.5 + 1e-6  # the third arm a quarter of the time
