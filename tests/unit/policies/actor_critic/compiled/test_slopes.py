"""The gradients that `kernels.py` has by formula are those that torch finds in the losses of `algorithms`."""

import numpy as np
import pytest
import torch

from marl_ray.algorithms.losses import ratios
from marl_ray.algorithms.losses.clipped_surrogate import clipped_surrogate
from marl_ray.algorithms.losses.critics import clipped_value_loss
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.policies.actor_critic import distributions
from marl_ray.policies.actor_critic.compiled import kernels, sampling
from marl_ray.policies.actor_critic.compiled.arguments import DecisionArrays, PPOSettings
from marl_ray.policies.actor_critic.distributions import Categorical

N, ACTIONS = 400, 3
TERMS = PPOSettings(0.8, 1.25, 3.0, 0.25, 0.5, 0.7, 0.1, 2.0 * N)
"""Bounds, dual clip, value clip, Huber's delta, weights of value and entropy, decisions."""


def arrays(**fields: np.ndarray) -> DecisionArrays:
    """Decisions with zeros for the other fields."""
    floats = ("old_log_probs", "advantages", "returns", "old_values")
    zeros = {key: np.zeros(N, np.float32) for key in floats} | {
        key: np.zeros(N, np.int64) for key in ("actions", "heads")
    }
    return DecisionArrays(**zeros | fields)


@pytest.mark.parametrize("masked", [False, True])
def test_the_slopes_of_the_logits_are_torchs(masked):
    """Inside of the clip and beyond it, at the dual clip, beyond the limit of the log ratio, and for an advantage of 0."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(N, ACTIONS)).astype(np.float32)
    allowed = rng.random((N, ACTIONS)) < 0.7 if masked else np.empty((0, ACTIONS), bool)
    actions = rng.integers(ACTIONS, size=N)
    if masked:
        allowed[np.arange(N), actions] = True
    advantages = rng.choice([-2.0, -0.5, 0.0, 1.5], N).astype(np.float32)
    categorical, z = Categorical((ACTIONS,), ()), torch.tensor(logits, requires_grad=True)
    log_probs = categorical.normalize(z, torch.tensor(allowed) if masked else None)
    chosen = categorical.log_prob(log_probs, torch.tensor(actions))
    changes = rng.choice([0.0, 0.1, -0.1, 0.5, -0.5, 1.5, 25.0, -25.0], N)
    old = (chosen.detach() - torch.tensor(changes)).float()
    loss, clipped = clipped_surrogate(token_ratio(chosen, old), torch.tensor(advantages), *TERMS[:2], TERMS.dual_clip)
    total = (loss - TERMS.entropy_coef * categorical.entropy(log_probs)).sum() / TERMS.decisions
    total.backward()
    data, outputs, sums = (
        arrays(actions=actions, old_log_probs=old.numpy(), advantages=advantages),
        logits.copy(),
        np.zeros(5),
    )
    kernels.policy_slopes(outputs, allowed, np.arange(N + 1), np.arange(N), data, TERMS, sums)
    assert z.grad is not None
    np.testing.assert_allclose(outputs, z.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert 0.2 < sums[3] * 2 == pytest.approx(float(clipped.float().mean()))
    assert sums[0] == pytest.approx(float(loss.detach().sum()) / TERMS.decisions, rel=1e-5)


def test_the_slopes_of_the_values_are_torchs():
    """Within the clip and beyond it, on both sides of Huber's delta, and where both losses are equal."""
    rng = np.random.default_rng(0)
    values, old, returns = (rng.choice(np.arange(-2, 2.25, 0.25), N).astype(np.float32) for _ in range(3))
    v = torch.tensor(values, requires_grad=True)
    loss = clipped_value_loss(v, torch.tensor(old), torch.tensor(returns), TERMS.value_clip, TERMS.huber_delta)
    (TERMS.value_coef * loss.sum() / TERMS.decisions).backward()
    outputs, sums = values[:, None].copy(), np.zeros(5)
    data = arrays(old_values=old, returns=returns)
    kernels.value_slopes(outputs, np.arange(N + 1), np.arange(N), data, TERMS, sums)
    assert v.grad is not None
    np.testing.assert_allclose(outputs[:, 0], v.grad.numpy(), rtol=1e-6)
    beyond = np.abs(values - old) > TERMS.value_clip
    tie = np.abs(old + np.copysign(TERMS.value_clip, values - old) - returns) == np.abs(values - returns)
    assert (beyond & tie).sum() > 10
    assert sums[4] == pytest.approx(float(loss.detach().sum()) / TERMS.decisions, rel=1e-5)


def test_compiled_code_has_the_constants_of_the_losses_and_the_distributions():
    assert kernels.LOG_RATIO_LIMIT == ratios.LOG_RATIO_LIMIT
    assert kernels.FORBIDDEN_LOGIT == sampling.FORBIDDEN_LOGIT == np.float32(distributions.FORBIDDEN_LOGIT)
