"""The shared maths of the algorithms against slow loops, and the properties that batching must not break."""

import math
from dataclasses import replace
from functools import partial

import pytest
import slow_references as references
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import batches as toy_batches

from marl_ray.algorithms.advantages.groups import (
    center_scores,
    group_index,
    leave_one_out,
    standardize_scores,
    subtract_greedy_score,
)
from marl_ray.algorithms.advantages.normalization import moments, standardize
from marl_ray.algorithms.advantages.returns import reward_to_go, sequence_scores
from marl_ray.algorithms.losses.aggregation import count_tokens_and_sequences, loss_weights
from marl_ray.algorithms.losses.kl import adaptive_coefficient, kl_estimate
from marl_ray.algorithms.losses.ratios import (
    gspo_token_log_ratio,
    sequence_log_ratio,
    token_ratio,
    truncated_importance,
)
from marl_ray.algorithms.without_critic.remax import REMAX
from marl_ray.config import HyperParameters
from marl_ray.errors import MarlRayError

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length")
KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
GROUP_FORMULAS = {
    "centred": (center_scores, references.center_scores),
    "verl": (standardize_scores, references.standardize_scores(1e-6, 1)),
    "TRL": (partial(standardize_scores, eps=1e-4), references.standardize_scores(1e-4, 1)),
    "population": (partial(standardize_scores, eps=1e-8, ddof=0), references.standardize_scores(1e-8, 0)),
    "leave-one-out": (leave_one_out, references.leave_one_out),
}


def close(actual, expected, name=""):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda message: f"{name} {message}")


def ragged_mask(batch, steps, seed):
    """A generator and a (B, T) mask: empty, one-token, full and gappy rows, as chance has it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, steps, generator=generator) < 0.7
    lengths = torch.randint(0, steps + 1, (batch, 1), generator=generator)
    lengths[torch.rand(batch, 1, generator=generator) < 0.2] = 0
    lengths[torch.rand(batch, 1, generator=generator) < 0.2] = min(1, steps)
    return generator, mask & (torch.arange(steps) < lengths)


def numbers(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


batches = st.builds(ragged_mask, st.integers(1, 7), st.integers(0, 8), st.integers(0, 10**6))


@st.composite
def groups(draw):
    """Scores with ties and missing ones, their group numbers, rows that count and greedy rows."""
    size = draw(st.integers(1, 12))

    def each(strategy):
        return draw(st.lists(strategy, min_size=size, max_size=size))

    values = draw(
        st.sampled_from(
            [
                st.sampled_from([0.1, 0.7]),
                st.just(0.1),
                st.floats(-5, 5).map(lambda x: round(x, 6)),
                st.sampled_from([1.0, math.nan]),
            ]
        )
    )
    scores = torch.tensor(each(values), dtype=torch.float64)
    keys = [torch.tensor(each(st.integers(0, high))) for high in (1, 1, 0)]
    index, count = group_index(*keys)
    return scores, index, count, torch.tensor(each(st.booleans())), torch.tensor(each(st.booleans()))


@given(batches, st.floats(0, 1))
def test_reward_to_go_equals_the_loop(batch, gamma):
    generator, mask = batch
    rewards, is_last = numbers(generator, *mask.shape), torch.rand(mask.shape, generator=generator) < 0.2
    close(reward_to_go(rewards, mask, is_last, gamma), references.reward_to_go(rewards, mask, is_last, gamma))
    close(sequence_scores(rewards), torch.tensor([math.fsum(row) for row in rewards.tolist()], dtype=torch.float64))


def test_a_terminal_reward_reaches_every_own_token_across_tool_output():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]])
    mask = torch.tensor([[True, False, True, False, False]])
    assert reward_to_go(rewards, mask, mask & False, 1.0).tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]]
    assert reward_to_go(rewards, mask, mask & False, 0.5).tolist() == [[0.5, 0.0, 1.0, 0.0, 0.0]]
    assert rewards.tolist() == [[0.0, 0.0, 0.0, 1.0, 0.0]]


@given(st.lists(st.tuples(*[st.integers(-1, 1)] * 5), min_size=1, max_size=12))
def test_a_group_is_a_distinct_start_agent_turn_and_prompt(keys):
    all_keys = torch.tensor(keys)
    columns = *all_keys[:, :3].unbind(1), all_keys[:, 3:]
    index, count = group_index(*columns)
    expected, number = references.group_index(*columns)
    assert count == number and torch.equal(index, expected)


@given(batch=groups(), singleton=st.sampled_from(["zero", "score"]))
def test_group_estimators_equal_the_loop(batch, singleton):
    scores, index, count, include, _ = batch
    for name, (estimator, formula) in GROUP_FORMULAS.items():  # drawing a batch takes longer than all of them
        expected = references.score_groups(scores, index, include, formula, singleton)
        result = estimator(scores, index, count, include, singleton=singleton)
        close(result, expected, name)
        assert torch.equal(result == 0, expected == 0) or not torch.isfinite(expected).all(), name


@given(batch=groups(), order=st.randoms(use_true_random=False))
def test_permuting_sequences_permutes_group_estimates(batch, order):
    scores, index, count, include, _ = batch
    permutation = list(range(len(scores)))
    order.shuffle(permutation)
    for name, (estimator, _) in GROUP_FORMULAS.items():
        close(
            estimator(scores[permutation], index[permutation], count, include[permutation]),
            estimator(scores, index, count, include)[permutation],
            name,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GROUP_FORMULAS)
def test_equal_scores_give_exactly_zero(name, dtype):
    scores, every = torch.full((3,), 0.1, dtype=dtype), torch.ones(3, dtype=torch.bool)
    result = GROUP_FORMULAS[name][0](scores, torch.zeros(3, dtype=torch.int64), 1, every)
    assert result.dtype == dtype and result.tolist() == [0.0, 0.0, 0.0]


def test_a_small_spread_on_a_large_offset_is_kept():
    scores, every = torch.tensor([1e6, 1e6 + 1], dtype=torch.float32), torch.ones(2, dtype=torch.bool)
    result = standardize_scores(scores, torch.zeros(2, dtype=torch.int64), 1, every)
    torch.testing.assert_close(result, torch.tensor([-(0.5**0.5), 0.5**0.5]), rtol=1e-5, atol=0)


def test_an_unknown_singleton_rule_is_an_error():
    with pytest.raises(MarlRayError, match=r"^singleton: expected 'zero' or 'score', got 'raw'$"):
        center_scores(torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1, torch.ones(1) > 0, singleton="raw")


@given(groups())
def test_subtracted_greedy_scores_equal_the_loop_or_names_the_groups_without_one(batch):
    scores, index, count, include, greedy = batch
    needed = set(index[include & ~greedy & ~scores.isnan()].tolist())
    if needed <= set(index[greedy].tolist()):
        expected = references.subtract_greedy_score(scores, index, include, greedy)
        close(subtract_greedy_score(scores, index, count, include, greedy), expected)
    else:
        with pytest.raises(MarlRayError, match=f"of {count} groups have no greedy row"):
            subtract_greedy_score(scores, index, count, include, greedy)


def test_remax_learns_nothing_from_a_turn_that_the_greedy_episode_never_came_to():
    full = toy_batches.batch(3, groups=2, members=4, greedy=True)
    later = (torch.arange(8) == 2) | (torch.arange(8) == 6)
    responses = replace(
        full,
        turn=later.long(),
        observations=full.observations[..., :0],
        prompts=torch.zeros(8, 1, dtype=torch.int64),
    )
    advantages, _ = REMAX.advantages(responses, HyperParameters(gamma=1.0))
    expected, _ = REMAX.advantages(full, HyperParameters(gamma=1.0))
    assert not advantages[later].any() and expected[later].any()
    close(advantages[~later], expected[~later])
    with pytest.raises(MarlRayError, match=r"^greedy: 2 of 4 groups have no greedy row; expected one in every group$"):
        REMAX.advantages(replace(full, turn=later.long()), HyperParameters(gamma=1.0))


@given(batches)
def test_weighted_losses_sum_to_the_aggregate(batch):
    generator, mask = batch
    losses, (tokens, sequences) = numbers(generator, *mask.shape), count_tokens_and_sequences(mask)
    for mode in MODES:
        weights = loss_weights(mask, mode, tokens, sequences, 17, torch.float64)
        expected = references.aggregate(losses, mask, mode, 17)
        assert float((weights * losses).sum()) == pytest.approx(expected, rel=1e-10, abs=1e-10), mode
        assert not weights[~mask].any(), mode


@given(batch=batches, parts=st.integers(1, 4), extra=st.integers(0, 3))
def test_weights_do_not_depend_on_how_the_minibatch_is_divided_or_padded(batch, parts, extra):
    _, mask = batch
    tokens, sequences = count_tokens_and_sequences(mask)
    pieces, wide = mask.chunk(parts), torch.cat((mask, mask.new_zeros(len(mask), extra)), 1)
    assert torch.equal(sum(count_tokens_and_sequences(piece) for piece in pieces), count_tokens_and_sequences(mask))
    for mode in MODES:
        full = loss_weights(mask, mode, tokens, sequences, 17, torch.float64)
        divided = [loss_weights(piece, mode, tokens, sequences, 17, torch.float64) for piece in pieces]
        close(torch.cat(divided), full, mode)
        counts = count_tokens_and_sequences(wide)
        padded = loss_weights(wide, mode, *counts, fixed_length=17, dtype=torch.float64)
        close(padded[:, : mask.shape[1]], full, mode)


def test_aggregation_errors_name_the_key():
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(MarlRayError, match=r"^fixed_length: expected a positive number of tokens, got None$"):
        loss_weights(mask, "fixed-length", 1, 1)
    with pytest.raises(MarlRayError, match=r"aggregation: expected one of token-mean, .*got 'mean'"):
        loss_weights(mask, "mean", 1, 1)


@given(batch=batches, scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_kl_estimates_equal_the_loop(batch, scale):
    generator, mask = batch
    log_probs, reference = (scale * numbers(generator, *mask.shape) for _ in range(2))
    for kind in KINDS:
        close(kl_estimate(log_probs, reference, kind), references.kl_estimate(log_probs, reference, kind), kind)


def test_straight_through_estimates_have_the_gradient_of_k2():
    log_probs = torch.linspace(-3, 0, 7, dtype=torch.float64, requires_grad=True)
    reference = torch.linspace(-1, -2, 7, dtype=torch.float64)
    gradients = {
        kind: torch.autograd.grad(kl_estimate(log_probs, reference, kind).sum(), log_probs)[0] for kind in KINDS
    }
    assert torch.equal(gradients["k1+"], gradients["k2"]) and torch.equal(gradients["k3+"], gradients["k2"])
    assert not torch.allclose(gradients["k3"], gradients["k2"])


def test_expected_values_and_gradients_are_those_of_the_divergences():
    generator = torch.Generator().manual_seed(1)
    logits = numbers(generator, 5).requires_grad_()
    log_probs, reference = logits.log_softmax(0), numbers(generator, 5).log_softmax(0)
    probs = log_probs.exp()

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def expected(kind):
        return (probs.detach() * kl_estimate(log_probs, reference, kind)).sum()

    backward = (probs * (log_probs - reference)).sum()
    forward = (reference.exp() * (reference - log_probs)).sum()
    for kind in ("k1", "k3", "k1+", "k3+"):
        close(expected(kind), backward)
    for kind in ("k2", "k1+", "k3+"):
        close(gradient(expected(kind)), gradient(backward))
    close(gradient(expected("k3")), gradient(forward))
    close(gradient(expected("k1")), torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_distant_policies_have_finite_estimates_and_gradients(kind):
    log_probs = torch.tensor([-200.0, 0.0], requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor([0.0, -200.0]), kind)
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert estimate.isfinite().all() and gradient.isfinite().all()


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(MarlRayError, match=r"^kl_estimator: expected one of k1, k2, k3, abs, k1\+, k3\+, got 'full'$"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "full")


@pytest.mark.parametrize(("kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (9.0, 1.02), (0.0, 0.98)])
def test_adaptive_coefficient_follows_its_error_within_a_fifth(kl, factor):
    assert adaptive_coefficient(0.5, kl, target=0.1, horizon=1000, n=100) == pytest.approx(0.5 * factor)


def test_adaptive_coefficient_needs_a_target():
    with pytest.raises(MarlRayError, match="kl_target, kl_horizon: expected positive numbers"):
        adaptive_coefficient(0.5, 0.1, target=0.0, horizon=1000, n=100)


@given(
    batch=batches,
    ddof=st.sampled_from([0, 1]),
    center=st.booleans(),
    scale=st.booleans(),
    equal=st.booleans(),
    parts=st.integers(1, 4),
)
def test_standardise_equals_the_loop_whatever_the_parts(batch, ddof, center, scale, equal, parts):
    generator, mask = batch
    x = torch.full(mask.shape, 0.1, dtype=torch.float64) if equal else numbers(generator, *mask.shape)
    x[~mask] = math.nan
    total = sum(moments(a, b) for a, b in zip(x.chunk(parts), mask.chunk(parts), strict=True))
    assert total.dtype == torch.float64
    result = standardize(x, mask, total, ddof, 1e-8, center, scale)
    close(result, references.standardize(x, mask, ddof, 1e-8, center, scale))
    if equal and center:
        assert not result.any()


def test_standardised_float32_has_mean_zero_and_deviation_one():
    x = 1e3 + torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.5
    standardized = standardize(x, mask, moments(x, mask), ddof=1)[mask].double()
    assert abs(float(standardized.mean())) < 1e-4 and float(standardized.std()) == pytest.approx(1, abs=1e-4)


@given(batch=batches, scale=st.sampled_from([0.1, 3.0, 30.0]))
def test_ratios_equal_the_loop(batch, scale):
    generator, mask = batch
    new, old = (scale * numbers(generator, *mask.shape) for _ in range(2))
    close(token_ratio(new, old), references.token_ratio(new, old))
    close(truncated_importance(new, old, 2.0), references.truncated_importance(new, old, 2.0))
    new[~mask] = math.nan
    for summed in (False, True):
        close(sequence_log_ratio(new, old, mask, summed), references.sequence_log_ratio(new, old, mask, summed))
    close(gspo_token_log_ratio(new, old, mask), references.gspo_token_log_ratio(new, old, mask))


def test_every_own_token_of_gspo_carries_its_own_gradient():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    old, mask = torch.tensor([[-1.5, -2.0, 0.0]]), torch.tensor([[True, True, False]])
    ratio = gspo_token_log_ratio(log_probs, old, mask)
    assert ratio.tolist() == [[0.25, 0.25, 0.0]]
    (gradient,) = torch.autograd.grad((ratio * torch.tensor([2.0, 5.0, 7.0])).sum(), log_probs)
    assert gradient.tolist() == [[2.0, 5.0, 0.0]]


def test_importance_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    assert not truncated_importance(old, torch.full((1, 2), -1.0), 2.0).requires_grad
