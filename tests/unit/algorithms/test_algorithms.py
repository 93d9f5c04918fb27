"""Every named algorithm against its formula in plain loops, float64."""

import math
import statistics
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runs.runs import PLAYING
from toys.batches import batch

from marl_ray.algorithms import PolicyLossInputs, algorithm_of
from marl_ray.algorithms.advantages.shaping import overlong_penalty
from marl_ray.config import SPECS, HyperParameters
from marl_ray.extensions import ALGORITHM
from marl_ray.trajectories import Trajectories

seeds = st.integers(0, 10**6)


def hyper(name: str, **more) -> HyperParameters:
    return HyperParameters.model_validate(SPECS[name].defaults | more)


def rows_of(data: Trajectories) -> list[list[float]]:
    """Rewards of every sequence's decisions."""
    pairs = zip(data.rewards, data.mask, strict=True)
    return [[float(r) for r, decided in zip(row, mask, strict=True) if decided] for row, mask in pairs]


def spread(data: Trajectories, per_row: list[list[float]]) -> torch.Tensor:
    out = torch.zeros_like(data.rewards)
    for i, values in enumerate(per_row):
        out[i, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return out


def members(data: Trajectories, i: int) -> list[int]:
    """Sequences of i's group that have decisions and are not greedy."""
    same = [j for j in range(len(data.group)) if data.group[j] == data.group[i]]
    return [j for j in same if data.mask[j].any() and not data.greedy[j]]


def score_based(data: Trajectories, rule) -> torch.Tensor:
    """`rule(own score, scores of its group, scores of the others)` for each sequence, at each of its decisions."""
    rewards = rows_of(data)
    scores = [sum(row) for row in rewards]
    result = []
    for i, row in enumerate(rewards):
        group = members(data, i)
        if i not in group or len(group) < 2:
            result.append([0.0] * len(row))
            continue
        value = rule(scores[i], [scores[j] for j in group], [scores[j] for j in group if j != i])
        result.append([value] * len(row))
    return spread(data, result)


def to_go(row: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]


GROUPED = {
    "grpo": lambda s, group, others: (s - statistics.mean(group)) / (statistics.stdev(group) + 1e-6),
    "dr_grpo": lambda s, group, others: s - statistics.mean(group),
    "rloo": lambda s, group, others: s - statistics.mean(others),
    "reinforce_pp_baseline": lambda s, group, others: s - statistics.mean(group),
}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gspo", "cispo", "dapo"])
@settings(max_examples=12)
@given(seed=seeds)
def test_group_advantages_equal_those_of_loops(name, seed):
    data = batch(seed)
    expected = score_based(data, GROUPED.get(name, GROUPED["grpo"]))
    torch.testing.assert_close(algorithm_of(name).advantages(data, hyper(name))[0], expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=12)
@given(seed=seeds, gamma=st.floats(0.5, 1))
def test_reinforce_pp_takes_rewards_to_go(seed, gamma):
    data = batch(seed)
    expected = spread(data, [to_go(row, gamma) for row in rows_of(data)])
    advantages, _ = algorithm_of("reinforce_pp").advantages(data, hyper("reinforce_pp", gamma=gamma))
    torch.testing.assert_close(advantages, expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=12)
@given(seed=seeds)
def test_remax_subtracts_the_greedy_score(seed):
    data = batch(seed, greedy=True)
    rewards = rows_of(data)
    expected = []
    for i, row in enumerate(rewards):
        (greedy,) = [j for j in range(len(rewards)) if data.group[j] == data.group[i] and data.greedy[j]]
        expected.append([x - sum(rewards[greedy]) for x in to_go(row, 1.0)])
    advantages, _ = algorithm_of("remax").advantages(data, hyper("remax"))
    sampled = ~data.greedy
    torch.testing.assert_close(advantages[sampled], spread(data, expected)[sampled], atol=1e-9, rtol=1e-9)


@settings(max_examples=12)
@given(seed=seeds)
def test_direct_dapo_advantage_is_the_critics_gain(seed):
    data, h = batch(seed), hyper("direct_dapo", lowest_return=-2.0, highest_return=3.0)

    def value(logit: float) -> float:
        return -2 + 5 / (1 + math.exp(-logit))

    expected, targets = [], []
    for i, row in enumerate(rows_of(data)):
        values = [value(float(x)) for x in data.values[i, : len(row)]]
        expected.append([r + (values[t + 1] if t + 1 < len(row) else 0.0) - values[t] for t, r in enumerate(row)])
        targets.append([min(max((x + 2) / 5, 0), 1) for x in to_go(row, 1.0)])
    advantages, soft = (
        algorithm_of("direct_dapo").advantages(data, h)[0],
        algorithm_of("direct_dapo").critic_targets(data, h),
    )
    torch.testing.assert_close(advantages, spread(data, expected), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(soft * data.mask, spread(data, targets), atol=1e-9, rtol=1e-9)


def evaluate(data: Trajectories, seed: int) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(seed)
    new = data.log_probs + 0.4 * torch.randn(data.log_probs.shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(data.log_probs.shape, generator=generator, dtype=torch.float64) * data.mask
    return decisions(new.requires_grad_(True), data, advantages)


def decisions(new: torch.Tensor, data: Trajectories, advantages: torch.Tensor) -> PolicyLossInputs:
    return PolicyLossInputs(new, data.log_probs, advantages, data.mask, data.log_probs, data.values)


def expected_loss(name: str, i: int, t: int, part: PolicyLossInputs, h: HyperParameters) -> float:
    low, high = h.clip_range
    advantage = float(part.advantages[i, t])
    ratios = (part.log_probs - part.old_log_probs).tolist()
    masked = [x for x, counts in zip(ratios[i], part.mask[i].tolist(), strict=True) if counts]
    new, ratio = part.log_probs[i, t].item(), math.exp(ratios[i][t])
    match name:
        case "remax":
            return -advantage * new
        case "cispo":
            return -min(max(ratio, low), high) * advantage * new
        case "direct_dapo":
            return 0.5 * h.regression_beta * (advantage / h.regression_beta - ratios[i][t]) ** 2
        case "cpo" | "macpo":
            return -ratio * advantage
        case "gspo":
            ratio = math.exp(sum(masked) / len(masked))
        case "rloo" if h.ratio_level == "sequence":
            ratio = math.exp(sum(masked))
    return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


@pytest.mark.parametrize("name", PLAYING)
@settings(max_examples=6)
@given(seed=seeds)
def test_policy_losses_equal_those_of_loops(name, seed):
    sequence = {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean"}
    for more in [{}, sequence] if name == "rloo" else [{}]:
        data, h = batch(seed), hyper(name, **more)
        part = evaluate(data, seed)
        loss = algorithm_of(name).policy_loss(part, h)
        assert loss.clipped.dtype == torch.bool
        for i, t in data.mask.nonzero().tolist():
            assert loss.loss[i, t].item() == pytest.approx(expected_loss(name, i, t, part, h), rel=1e-9, abs=1e-12)
        loss.loss[data.mask].sum().backward()
        assert torch.isfinite(part.log_probs.grad).all()


@pytest.mark.parametrize("name", PLAYING)
def test_the_first_gradient_is_the_policy_gradient(name):
    """At the ratio 1 every algorithm's loss has the gradient -A grad log pi."""
    data, h = batch(3), hyper(name)
    new = data.log_probs.clone().requires_grad_(True)
    advantages = torch.randn(new.shape, dtype=torch.float64) * data.mask
    losses = algorithm_of(name).policy_loss(decisions(new, data, advantages), h).loss
    losses[data.mask].sum().backward()
    torch.testing.assert_close(new.grad, -advantages, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ALGORITHM.builtins)
@settings(max_examples=5)
@given(seed=seeds)
def test_permuting_sequences_permutes_advantages(name, seed):
    data, h = batch(seed, greedy=SPECS[name].greedy), hyper(name)
    order = torch.randperm(len(data.group), generator=torch.Generator().manual_seed(seed))
    moved = {f.name: getattr(data, f.name) for f in fields(data)}
    shuffled = Trajectories(**{k: v if v is None else v[order] for k, v in moved.items()})
    expected = algorithm_of(name).advantages(data, h)[0][order]
    torch.testing.assert_close(algorithm_of(name).advantages(shuffled, h)[0], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.groups and not spec.critic_first])
def test_a_terminal_reward_reaches_every_decision(name):
    """gamma = lambda = 1, with steps of others (a tool's output, another's turn) in between."""
    data = batch(5)
    mask = data.mask.clone()
    mask[:, 1::2] = False
    last = (data.terminated | data.truncated).double()
    nothing = torch.zeros_like(data.values)
    data = replace(data, mask=mask, rewards=last, values=nothing, bootstrap=nothing)
    advantages, _ = algorithm_of(name).advantages(data, hyper(name, gamma=1.0, gae_lambda=1.0))
    torch.testing.assert_close(advantages, mask.double())


def test_groups_without_spread_teach_nothing():
    data = batch(7)
    data = replace(data, rewards=(data.terminated | data.truncated).double())
    for name in GROUPED:
        assert (algorithm_of(name).advantages(data, hyper(name))[0] == 0).all()


def test_overlong_penalty_is_the_papers_piecewise_line():
    lengths = torch.tensor([0, 15, 16, 18, 20, 25])
    expected = [0, 0, 0, -0.5, -1, -1]
    assert overlong_penalty(lengths, max_length=20, buffer=4, factor=1.0).tolist() == expected
    assert overlong_penalty(lengths, 20, 0, 1.0).tolist() == [0] * 6
