"""Fisher products against explicit matrices and second derivatives, and the conjugate gradient that inverts them."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.algorithms.constraints.trust_region import (
    conjugate_gradient,
    fisher_product,
    flatten,
    head_fisher_product,
    head_kl,
    unflatten,
)
from marl_ray.config import NetworkConfig
from marl_ray.policies.actor_critic.distributions import Categorical, Gaussian
from marl_ray.policies.actor_critic.policy import ActorCritic, EncodedRows

BOX = np.ones(2, dtype=np.float32)
HEADS: dict[str, tuple[Categorical | Gaussian, tuple[int, ...] | None]] = {
    "categorical": (Categorical((4,), ()), (4,)),
    "parts": (Categorical((2, 3, 2), (3,)), (2, 3, 2)),
    "gaussian": (Gaussian((2,), -BOX, BOX), None),
}


def small_policy(name, masked=False, seed=0):
    """A two-layer network in float64 that ends in the named head, its parameters, weights per decision and sizes."""
    distribution, sizes = HEADS[name]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    width = distribution.parameters
    parameters = {
        "first": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "second": 0.5 * torch.randn(4, width, generator=generator, dtype=torch.float64),
        "bias": 0.3 * torch.randn(width, generator=generator, dtype=torch.float64),
    }
    forbidden = torch.zeros(6, width, dtype=torch.bool)
    if masked:
        forbidden[::2, 1] = True

    def function(p):
        outputs = (rows @ p["first"]).tanh() @ p["second"] + p["bias"]
        outputs = outputs.masked_fill(forbidden, -math.inf)
        if sizes is None:  # Gaussian.normalize works in float32: too coarse for second differences
            mean, log_std = outputs.chunk(2, -1)
            return torch.cat([mean, log_std.clamp(-5, 2)], -1)
        return distribution.normalize(outputs)

    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    return distribution, function, parameters, weights / weights.sum(), sizes


def explicit_fisher(distribution, function, parameters, weights, sizes):
    """sum_n w_n E_a[grad log p(a) grad log p(a)'], summed over all actions, or by quadrature for a Gaussian, (D, D)."""
    outputs = function(parameters)
    if sizes is None:
        nodes, masses = np.polynomial.hermite_e.hermegauss(7)
        normal = list(zip(nodes, masses, strict=True))
        pairs = [((x, y), p * q / (2 * math.pi)) for x, p in normal for y, q in normal]
        mean, log_std = outputs.chunk(2, -1)
        choices = [(mean + log_std.exp() * torch.tensor(xy, dtype=mean.dtype), mass) for xy, mass in pairs]
    elif distribution.shape:
        grid = torch.cartesian_prod(*(torch.arange(size) for size in sizes))
        choices = [(row.expand(len(weights), -1), None) for row in grid]
    else:
        choices = [(torch.full((len(weights),), a), None) for a in range(sizes[0])]
    size = len(flatten(parameters))
    fisher = torch.zeros(size, size, dtype=torch.float64)
    for actions, mass in choices:

        def log_prob(flat, actions=actions):
            return distribution.log_prob(function(unflatten(flat, parameters)), actions)

        gradients = torch.autograd.functional.jacobian(log_prob, flatten(parameters))
        probability = distribution.log_prob(outputs, actions).exp() if mass is None else mass
        possible = torch.as_tensor(probability > 0).expand(len(weights))
        gradients = torch.where(possible[:, None], gradients, 0.0)
        fisher += gradients.T @ ((weights * probability)[:, None] * gradients)
    return fisher


CASES = [("categorical", False), ("categorical", True), ("parts", False), ("parts", True), ("gaussian", False)]


@pytest.mark.parametrize(("name", "masked"), CASES)
def test_fisher_product_equals_the_explicit_fisher_and_the_hessian_of_the_kl(name, masked):
    _, function, parameters, weights, sizes = policy = small_policy(name, masked)
    point = flatten(parameters)
    old = function(parameters)

    def divergence(flat):
        return (weights * head_kl(old, function(unflatten(flat, parameters)), sizes)).sum()

    product = fisher_product(function, parameters, weights, sizes)
    identity = torch.eye(len(point), dtype=torch.float64)
    fisher = torch.stack([product(column) for column in identity])
    torch.testing.assert_close(fisher, explicit_fisher(*policy), atol=1e-9, rtol=1e-7)
    if not masked:  # the second derivative of where() at -inf is not defined
        torch.testing.assert_close(fisher, torch.autograd.functional.hessian(divergence, point), atol=1e-9, rtol=1e-7)
    assert torch.linalg.eigvalsh(fisher)[0] > -1e-12


@pytest.mark.parametrize(("name", "masked"), CASES)
def test_half_the_quadratic_is_the_kl_of_a_small_step(name, masked):
    _, function, parameters, weights, sizes = small_policy(name, masked)
    vector = 1e-4 * torch.randn(len(flatten(parameters)), dtype=torch.float64, generator=torch.manual_seed(1))
    moved = function(unflatten(flatten(parameters) + vector, parameters))
    kl = (weights * head_kl(function(parameters), moved, sizes)).sum()
    quadratic = 0.5 * vector.dot(fisher_product(function, parameters, weights, sizes)(vector))
    assert kl.item() == pytest.approx(quadratic.item(), rel=1e-3)


def test_head_kl_equals_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    normals = [torch.distributions.Normal(x[:, :2], x[:, 2:].exp()) for x in (old, new)]
    torch.testing.assert_close(head_kl(old, new, None), torch.distributions.kl_divergence(*normals).sum(-1))
    categorical = Categorical((1, 3), (2,))
    old, new = categorical.normalize(old), categorical.normalize(new)
    parts = [torch.distributions.Categorical(logits=x[:, 1:]) for x in (old, new)]
    torch.testing.assert_close(head_kl(old, new, (1, 3)), torch.distributions.kl_divergence(*parts))
    assert head_kl(torch.zeros(1, 1), torch.full((1, 1), -math.inf), (1,)).item() == math.inf


def test_a_masked_action_has_no_fisher_information():
    outputs = torch.tensor([[0.5, 0.5, 0.0]]).log()
    product = head_fisher_product(outputs, torch.tensor([[1.0, -1.0, math.nan]]), (3,))
    assert product.tolist() == [[0.5, -0.5, 0.0]]


def test_products_of_parts_of_a_batch_add_up_and_repeat_exactly():
    _, function, parameters, weights, sizes = small_policy("parts")
    vector = torch.randn(len(flatten(parameters)), dtype=torch.float64, generator=torch.manual_seed(2))
    product = fisher_product(function, parameters, weights, sizes)
    full = product(vector)
    assert torch.equal(full, product(vector))
    parts = [
        fisher_product(lambda p, s=s: function(p)[s], parameters, weights[s], sizes)(vector)
        for s in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(parts[0] + parts[1], full)
    with torch.no_grad():
        assert torch.equal(fisher_product(function, parameters, weights, sizes)(vector), full)


@pytest.mark.parametrize(
    ("observations", "actions", "sizes"),
    [
        (spaces.MultiDiscrete([3, 4]), spaces.Discrete(5), (5,)),
        (spaces.Box(-1, 1, (4,)), spaces.MultiDiscrete([2, 3]), (2, 3)),
        (spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)), None),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(3), (3,)),
    ],
)
def test_fisher_product_of_an_actor_critic_is_the_derivative_of_the_gradient_of_the_kl(observations, actions, sizes):
    torch.manual_seed(0)
    policy = ActorCritic(observations, actions, NetworkConfig(hidden=[8]))
    observations.seed(0)
    rows = torch.stack([torch.as_tensor(observations.sample()).reshape(-1) for _ in range(9)])
    prepared = EncodedRows.from_rows(policy.actor, rows)
    parameters = dict(policy.actor.named_parameters())

    def function(p):
        raw = torch.func.functional_call(policy.actor, p, (prepared.values, prepared.columns))
        return prepared.expand(policy.distribution.normalize(raw))

    weights = torch.full((9,), 1 / 9)
    vector = torch.randn(len(flatten(parameters)))
    old = function(parameters).detach()
    kl = (weights * head_kl(old, function(parameters), sizes)).sum()
    gradient = torch.autograd.grad(kl, list(parameters.values()), create_graph=True)
    inner = torch.cat([g.reshape(-1) for g in gradient]).dot(vector)
    second = torch.autograd.grad(inner, list(parameters.values()), allow_unused=True)
    expected = torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).reshape(-1)
            for p, g in zip(parameters.values(), second, strict=True)
        ]
    )
    result = fisher_product(function, parameters, weights, sizes)(vector)
    assert not result.requires_grad
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-3)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 8))
@settings(max_examples=50)
def test_conjugate_gradient_solves(seed, size):
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T + 0.1 * torch.eye(size, dtype=torch.float64)
    target = 1e-6 * torch.randn(size, generator=generator, dtype=torch.float64)
    solution = conjugate_gradient(lambda x: matrix @ x, target, iterations=50, tolerance=1e-20)
    torch.testing.assert_close(matrix @ solution, target, atol=1e-14, rtol=1e-6)


def test_conjugate_gradient_counts_its_products_and_survives_degenerate_targets():
    calls = []

    def product(x):
        calls.append(1)
        return torch.arange(1.0, 21.0) * x

    conjugate_gradient(product, torch.ones(20), iterations=7)
    assert len(calls) == 7
    assert conjugate_gradient(product, torch.zeros(20)).tolist() == [0.0] * 20
    assert conjugate_gradient(lambda x: 0 * x, torch.ones(2)).tolist() == [0.0, 0.0]
    assert conjugate_gradient(product, torch.full((20,), math.nan)).shape == (20,)
