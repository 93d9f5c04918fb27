"""GAE against its definition as a double sum, and against the loop reference."""

import pytest
import slow_references as references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.algorithms.advantages.gae import gae_by_row, gae_by_step


def gae(*arguments, **named):
    """Both ways to it, which agree; the compiled one's results."""
    rows, steps = gae_by_row(*arguments, **named), gae_by_step(*arguments, **named)
    for row, step in zip(rows, steps, strict=True):
        torch.testing.assert_close(row, step, equal_nan=True)
    return rows


def reference(rewards, values, bootstrap, mask, terminated, truncated, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k} along each row's own steps up to a boundary; O(T^2), float64."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        segments, current = [], []
        for t in range(rewards.shape[1]):
            if mask[b, t]:
                current.append(t)
            if terminated[b, t] or truncated[b, t] or t == rewards.shape[1] - 1:
                end = 0.0 if terminated[b, t] else float(bootstrap[b, t])
                segments.append((current, t, end))
                current = []
        for decisions, last, end in segments:
            deltas = []
            for k, t in enumerate(decisions):
                after = float(values[b, decisions[k + 1]]) if k + 1 < len(decisions) else end
                until = decisions[k + 1] if k + 1 < len(decisions) else last + 1
                deltas.append(float(rewards[b, t:until].sum()) + gamma * after - float(values[b, t]))
            for k, t in enumerate(decisions):
                advantages[b, t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
    return advantages


def episodes(batch, steps, seed, share=0.7):
    """Random float64 arguments up to `truncated`: several episodes in a row, own steps or not at every end."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, bootstrap = torch.randn(3, batch, steps, generator=generator, dtype=torch.float64).unbind()
    chance = torch.rand(3, batch, steps, generator=generator)
    terminated, truncated, mask = chance[0] < 0.2, (chance[1] < 0.2) & (chance[0] >= 0.2), chance[2] < share
    return rewards, values, bootstrap, mask, terminated, truncated


any_episodes = st.builds(
    episodes, st.integers(1, 4), st.integers(0, 9), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.7, 1.0])
)
fractions = st.floats(0, 1)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@settings(max_examples=100)
@given(batch=any_episodes, gamma=fractions, lam=fractions)
def test_gae_equals_the_double_sum_and_the_loop(batch, gamma, lam):
    advantages, returns = gae(*batch, gamma, lam)
    values, mask = batch[1], batch[3]
    close(advantages, torch.where(mask, reference(*batch, gamma=gamma, lam=lam), 0.0))
    close(returns, torch.where(mask, advantages + values, 0.0))
    for result, expected in zip((advantages, returns), references.gae(*batch, gamma=gamma, lam=lam), strict=True):
        close(result, expected)


@given(batch=any_episodes, gamma=fractions, lam=fractions)
def test_signals_are_estimated_each_by_itself(batch, gamma, lam):
    *signals, mask, terminated, truncated = batch
    stacked = [torch.stack((x, -2 * x, x.flip(0)), 2) for x in signals]
    together = gae(*stacked, mask, terminated, truncated, gamma, lam)
    for k in range(3):
        alone = gae(*(x[..., k] for x in stacked), mask, terminated, truncated, gamma, lam)
        close(together[0][..., k], alone[0])
        close(together[1][..., k], alone[1])


@given(batch=any_episodes, gamma=fractions, lam=fractions, order=st.permutations(range(4)))
def test_permuting_rows_permutes_the_result(batch, gamma, lam, order):
    order = [b for b in order if b < len(batch[0])]
    for full, part in zip(gae(*batch, gamma, lam), gae(*(x[order] for x in batch), gamma, lam), strict=True):
        close(part, full[order])


@given(batch=any_episodes, gamma=fractions, lam=fractions, extra=st.integers(1, 3))
def test_columns_after_the_end_change_nothing(batch, gamma, lam, extra):
    *_, mask, terminated, truncated = batch
    truncated[:, -1:] |= ~terminated[:, -1:]
    steps = mask.shape[1]
    wide = [torch.cat((x, x.new_zeros(len(x), extra)), 1) for x in batch]
    for full, part in zip(gae(*wide, gamma, lam), gae(*batch, gamma, lam), strict=True):
        close(full[:, :steps], part)
        assert not full[:, steps:].any()


def test_rewards_at_masked_steps_go_to_the_latest_own_step_before_them():
    rewards = torch.tensor([[5.0, 0.0, 9.0, 0.0, 1.0, 2.0, 7.0, 3.0]])
    zero, no = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.bool)
    mask = torch.tensor([[False, True, False, True, True, False, False, True]])
    terminated = torch.tensor([[False, False, False, False, False, True, False, False]])
    advantages, _ = gae(rewards, zero, zero, mask, terminated, no, gamma=0.5, lam=1.0)
    # 5 comes before the first own step, 7 before the first own step of the second episode: nobody's.
    assert advantages.tolist() == [[0, 9 + 0.25 * 3, 0, 0.5 * 3, 3, 0, 0, 3]]


def test_terminal_reward_at_a_masked_step_reaches_every_own_step():
    rewards, zero = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.zeros(1, 4)
    mask, terminated = torch.tensor([[True, False, True, False]]), torch.tensor([[False, False, False, True]])
    advantages, _ = gae(rewards, zero, zero, mask, terminated, zero.bool(), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[1.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("ends", [[False, True, False, False], [False, False, True, False]])
def test_an_end_at_a_masked_step_stops_the_recursion(ends):
    values = torch.tensor([[1.0, 100.0, 100.0, 2.0]])
    mask, terminated = torch.tensor([[True, False, False, True]]), torch.tensor([ends])
    bootstrap = torch.tensor([[0.0, 0.0, 0.0, 4.0]])
    advantages, returns = gae(torch.zeros(1, 4), values, bootstrap, mask, terminated, mask & False, 1.0, 1.0)
    assert advantages.tolist() == [[-1.0, 0.0, 0.0, 2.0]]
    assert returns.tolist() == [[0.0, 0.0, 0.0, 4.0]]


def test_values_where_nobody_decides_do_not_matter():
    batch = episodes(4, 20, seed=0)
    rewards, values, bootstrap, mask, terminated, truncated = batch
    values, bootstrap = values.where(mask, torch.nan), bootstrap.where(truncated | (torch.arange(20) == 19), torch.nan)
    results = gae(rewards, values, bootstrap, mask, terminated, truncated, 0.9, 0.9)
    for result, expected in zip(results, gae(*batch, 0.9, 0.9), strict=True):
        assert torch.equal(result, expected)


def test_inputs_stay_as_they_were_and_nothing_carries_a_gradient():
    batch = episodes(1, 6, seed=0)
    copies = [x.clone() for x in batch]
    batch[1].requires_grad_()
    advantages, returns = gae(*batch, 0.9, 0.9)
    assert not advantages.requires_grad and not returns.requires_grad
    assert all(torch.equal(x, copy) for x, copy in zip(batch, copies, strict=True))


def test_truncation_bootstraps_and_termination_does_not():
    rewards, values = torch.zeros(2, 2), torch.zeros(2, 2)
    bootstrap = torch.full((2, 2), 5.0)
    first = torch.tensor([[True, False], [True, False]])
    terminated, truncated = first & torch.tensor([[True], [False]]), first & torch.tensor([[False], [True]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, _ = gae(rewards, values, bootstrap, mask, terminated, truncated, 0.9, 0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 4.5], [4.5, 4.5]]))
