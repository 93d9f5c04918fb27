"""GAE against its definition as a double sum."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.algorithms.gae import gae


def reference(rewards, values, bootstrap, mask, terminated, truncated, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k} along each row's own steps until the row is cut; O(T^2), float64."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        segments, current = [], []
        for t in range(rewards.shape[1]):
            if mask[b, t]:
                current.append(t)
            if terminated[b, t] or truncated[b, t] or t == rewards.shape[1] - 1:
                end = 0.0 if terminated[b, t] else float(bootstrap[b, t])
                segments.append((current, end))
                current = []
        for own, end in segments:
            deltas = []
            for k, t in enumerate(own):
                after = float(values[b, own[k + 1]]) if k + 1 < len(own) else end
                deltas.append(float(rewards[b, t]) + gamma * after - float(values[b, t]))
            for k, t in enumerate(own):
                advantages[b, t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
    return advantages


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    steps=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_equals_the_double_sum(batch, steps, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, bootstrap = torch.randn(3, batch, steps, generator=generator, dtype=torch.float64).unbind()
    chance = torch.rand(3, batch, steps, generator=generator)
    terminated, truncated, mask = chance[0] < 0.2, (chance[1] < 0.2) & (chance[0] >= 0.2), chance[2] < 0.8
    arguments = (rewards, values, bootstrap, mask, terminated, truncated, gamma, lam)
    advantages, returns = gae(*arguments)
    torch.testing.assert_close(advantages, torch.where(mask, reference(*arguments), 0.0))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))


def test_terminal_reward_reaches_every_own_step_across_masked_ones():
    rewards = torch.tensor([[0.0, 9.0, 0.0, 1.0]])
    zero, no = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool)
    mask, terminated = torch.tensor([[True, False, True, True]]), torch.tensor([[False, False, False, True]])
    advantages, _ = gae(rewards, zero, zero, mask, terminated, no, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[1.0, 0.0, 1.0, 1.0]]


def test_truncation_bootstraps_and_termination_does_not():
    rewards, values = torch.zeros(2, 2), torch.zeros(2, 2)
    bootstrap = torch.full((2, 2), 5.0)
    first = torch.tensor([[True, False], [True, False]])
    terminated, truncated = first & torch.tensor([[True], [False]]), first & torch.tensor([[False], [True]])
    advantages, _ = gae(rewards, values, bootstrap, torch.ones(2, 2, dtype=bool), terminated, truncated, 0.9, 0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 4.5], [4.5, 4.5]]))
