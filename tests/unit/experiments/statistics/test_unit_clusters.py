"""Clusters and blocks of time: how they get their arms, and what their outcomes prove."""

import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.experiments.assignment.rendezvous import AssignmentTable, block_group, block_of, block_span, draw_arm
from marl_ray.experiments.designs.adjustment import summarise
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.missing_outcomes import judge_reporting
from marl_ray.experiments.statistics.sequential import judge_harm, judge_promotion
from marl_ray.experiments.statistics.unit_clusters import block_summaries, pool_strata, summary_of

START = 1.7e9
MOMENTS = st.floats(0, 4e9)
LENGTHS = st.one_of(st.sampled_from([0.5, 1.0, 600.0, 86_400.0]), st.floats(0.01, 1e6))


def blocks(n: int, block_s: float = 600.0) -> list[str]:
    return [block_of(START + (k + 0.5) * block_s, block_s) for k in range(n)]


@given(MOMENTS, LENGTHS)
def test_a_moment_lies_in_its_block(at, length):
    start, parsed = block_span(block_of(at, length))
    assert parsed == length
    assert start - 1e-5 <= at <= start + length + 1e-5
    assert block_of(start + length / 2, length) == block_of(at, length)


@given(MOMENTS, st.sampled_from([0.5, 1.0, 7.25, 600.0, 86_400.0]), st.integers(2, 5))
def test_consecutive_blocks_fill_groups_in_order(at, length, size):
    arms = [block_group(block_of(at + k * length, length), size) for k in range(2 * size)]
    places = [group * size + place for group, place in arms]
    assert places == list(range(places[0], places[0] + 2 * size))


@pytest.mark.parametrize("arms", ["ab", "abc", "abcd"])
def test_with_equal_weights_every_group_of_blocks_has_every_arm_once(arms):
    table = AssignmentTable(dict.fromkeys(arms, 2.0), "salt", 1)
    names = blocks(len(arms) * 60)
    names = names[-block_group(names[0], len(arms))[1] % len(arms) :]
    assigned = [table.assign_block(name).arm for name in names]
    groups = [tuple(assigned[k : k + len(arms)]) for k in range(0, len(assigned) - len(arms) + 1, len(arms))]
    assert {"".join(sorted(group)) for group in groups} == {arms}
    counts = Counter(groups)
    assert len(counts) == math.factorial(len(arms)) or len(arms) == 4
    if len(arms) == 2:
        assert stats.binomtest(counts[("a", "b")], len(groups)).pvalue > 0.001


@pytest.mark.parametrize("weights", [{"a": 0.7, "b": 0.3}, {"a": 1.0, "b": 2.0, "c": 5.0, "off": 0.0}])
def test_a_blocks_chance_of_an_arm_is_the_propensity_that_is_logged(weights):
    total, name = sum(weights.values()), blocks(1)[0]
    draws = [AssignmentTable(weights, f"salt{k}", 1).assign_block(name) for k in range(4_000)]
    assert all(draw.propensity == weights[draw.arm] / total for draw in draws)
    live = [arm for arm in weights if weights[arm]]
    counts = [sum(draw.arm == arm for draw in draws) for arm in live]
    assert stats.chisquare(counts, [4_000 * weights[arm] / total for arm in live]).pvalue > 0.001


def test_shares_of_blocks_stay_close_to_the_weights():
    arms = [AssignmentTable({"a": 0.7, "b": 0.3}, "s", 1).assign_block(name).arm for name in blocks(2_000)]
    shares = [arms[: k + 1].count("b") / (k + 1) for k in range(99, 2_000, 100)]
    # Coins would be off by more than this now and then: their deviation is 0.046 at first.
    assert max(abs(share - 0.3) for share in shares) < 0.06


def test_blocks_do_not_depend_on_the_order_of_arms_and_are_pinned():
    table = AssignmentTable({"a": 1.0, "b": 3.0}, "salt", 1)
    other = AssignmentTable({"b": 3.0, "a": 1.0}, "salt", 1)
    names = blocks(50)
    assert [table.assign_block(name) for name in names] == [other.assign_block(name) for name in names]
    # Fixed for good: another value would change a block's arm while it lasts.
    assert "".join(table.assign_block(name).arm for name in names[:16]) == PINNED


PINNED = "babbbabbbbabbbbb"


def test_what_is_drawn_is_the_session_the_cluster_or_the_block():
    table = AssignmentTable({"a": 1.0, "b": 1.0}, "salt", 1)
    options = {"at": START, "block_s": 600.0}
    for k in range(20):
        assert draw_arm(table, "session", f"u{k}", cluster="c", **options) == (table.assign(f"u{k}"), None)
        assert draw_arm(table, "cluster", f"u{k}", cluster="c", **options) == (table.assign("c"), "c")
        block = block_of(START, 600.0)
        assert draw_arm(table, "switchback", f"u{k}", cluster="c", **options) == (table.assign_block(block), block)
    with pytest.raises(ValueError, match=r"^cluster: expected the unit's cluster$"):
        draw_arm(table, "cluster", "u", **options)


@given(st.lists(st.floats(-1e3, 1e3), max_size=30))
def test_summaries_are_those_of_numpy(values):
    summary, expected = summary_of(values), summarise(np.array(values))
    assert summary.n == expected.n
    if values:
        assert summary.mean == pytest.approx(expected.mean, abs=1e-9)
        assert summary.variance == pytest.approx(expected.variance, abs=1e-6)


def test_pairs_of_blocks_give_the_paired_tests_variance():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=40)
    t, c = shared + 0.1 * rng.normal(size=40), shared + 0.1 * rng.normal(size=40)
    first, second = block_summaries([({(k, 0): t[k] for k in range(40)}, {(k, 1): c[k] for k in range(40)})])
    error = stats.ttest_rel(t, c).statistic
    raised = 1 + math.sqrt(2 / 39)
    paired = ((first.mean - second.mean) / error) ** 2
    assert first.variance / 40 + second.variance / 40 == pytest.approx(paired * raised)
    assert (first.n, first.mean) == (40, pytest.approx(t.mean()))


def test_few_groups_never_make_the_variance_smaller():
    t, c = {(k, 0): float(k) for k in range(10)}, {(k, 1): k + 0.1 * (k % 2) for k in range(10)}
    first, second = block_summaries([(t, c)])
    assert first.variance >= summary_of(list(t.values())).variance
    assert second.variance >= summary_of(list(c.values())).variance
    assert [arm.n for arm in block_summaries([({}, c)])] == [0, 0]


RUNS, ALPHA = 140, 0.05


def fires(treatment: Summary, control: Summary, first: int) -> bool:
    return judge_harm(treatment, control, alpha=ALPHA, margin=0.0, min_outcomes=first).proven


def test_sessions_of_clusters_roll_back_a_harmless_arm_and_clusters_do_not():
    """Matches of 20 players share their luck; a look after every tenth match."""
    rng, naive, honest = np.random.default_rng(1), 0, 0
    for _ in range(RUNS):
        treated = rng.random(300) < 0.5
        sessions = rng.normal(size=(300, 1)) + rng.normal(size=(300, 20))
        means, fired = sessions.mean(1), [False, False]
        for k in range(40, 301, 10):
            arms = [treated[:k], ~treated[:k]]
            fired[0] |= fires(*(summarise(sessions[:k][arm].ravel()) for arm in arms), first=50)
            if min(arm.sum() for arm in arms) >= 20:
                fired[1] |= fires(*(summarise(means[:k][arm]) for arm in arms), first=20)
        naive, honest = naive + fired[0], honest + fired[1]
    assert honest <= ALPHA * RUNS
    assert naive > 0.3 * RUNS


@cache
def treated_blocks(share: float, run: int) -> np.ndarray:
    """The blocks, of 240, in which the treatment is; drawn once for all series."""
    table = AssignmentTable({"a": 1 - share, "b": share}, f"run{run}", 1)
    return np.array([table.assign_block(name).arm == "b" for name in blocks(240)])


SERIES = {"drift": 0.9, "day and night": 0.0, "highs after lows": -0.8}


@pytest.mark.parametrize(
    ("series", "share"),
    [
        ("drift", 0.5),
        ("highs after lows", 0.5),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("day and night", 0.5), ("drift", 0.2))),
    ],
)
def test_switchbacks_whose_blocks_are_alike_or_not_err_at_most_alpha(series, share):
    """240 blocks whose sessions share their time's luck, whichever arm they have."""
    rng, wrong, promoted, naive = np.random.default_rng(2), 0, 0, 0
    groups = [block_group(name, 2) for name in blocks(240)]
    for run in range(RUNS):
        treated, values, rho = treated_blocks(share, run), rng.normal(size=240), SERIES[series]
        for k in range(1, 240):
            values[k] = rho * values[k - 1] + math.sqrt(1 - rho**2) * values[k]
        if series == "day and night":
            values = values / 3 + 2 * np.sin(np.arange(240) * 2 * math.pi / 24 + rng.random() * 7)
        fired = [False, False, False]
        for k in range(60, 241, 30):
            treatment, control = (
                {groups[j]: values[j] for j in range(k) if treated[j] == is_treated} for is_treated in (True, False)
            )
            first, second = block_summaries([(treatment, control)])
            fired[0] |= fires(first, second, 10)
            worse = Summary(first.n, first.mean - 0.3, first.variance)
            fired[1] |= judge_promotion(worse, second, alpha=ALPHA, margin=0.3, min_outcomes=10).proven
            # Thirty sessions in each block, as if each were its own observation.
            totals = (summarise(np.array(list(arm.values()))) for arm in (treatment, control))
            fired[2] |= fires(*(Summary(30 * total.n, total.mean, total.variance + 1) for total in totals), first=50)
        wrong, promoted, naive = wrong + fired[0], promoted + fired[1], naive + fired[2]
    assert wrong <= ALPHA * RUNS
    assert promoted <= ALPHA * RUNS
    assert naive > ALPHA * RUNS


def test_groups_find_a_harm_that_the_time_of_day_hides():
    rng, names = np.random.default_rng(3), blocks(240)
    groups = [block_group(name, 2) for name in names]
    paired = unpaired = 0
    for run in range(20):
        table = AssignmentTable({"a": 1.0, "b": 1.0}, f"power{run}", 1)
        treated = np.array([table.assign_block(name).arm == "b" for name in names])
        values = 0.3 * rng.normal(size=240) + 2 * np.sin(np.arange(240) * 2 * math.pi / 144) - 0.3 * treated
        treatment, control = (
            {groups[j]: values[j] for j in range(240) if treated[j] == is_treated} for is_treated in (True, False)
        )
        paired += fires(*block_summaries([(treatment, control)]), 20)
        unpaired += fires(*(summary_of(list(arm.values())) for arm in (treatment, control)), first=20)
    assert paired >= 18
    assert unpaired <= 2


@given(st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=5), st.integers(0, 10**6))
def test_strata_add_up_to_the_weighted_difference_and_its_variance(sizes, seed):
    rng = np.random.default_rng(seed)
    strata = [(summarise(rng.normal(size=n)), summarise(rng.normal(size=m))) for n, m in sizes]
    first, second = pool_strata(strata)
    weights = np.array([n * m / (n + m) for n, m in sizes]) / sum(n * m / (n + m) for n, m in sizes)
    assert first.mean - second.mean == pytest.approx(sum(weights * [t.mean - c.mean for t, c in strata]))
    for k, arm in enumerate((first, second)):
        n = np.array([stratum[k].n for stratum in strata])
        assert arm.n == pytest.approx(1 / sum(weights**2 / n), abs=1) and arm.n <= sum(n)
    if len(sizes) == 1:
        assert (first.n, second.n) == sizes[0]
        assert (first.mean, first.variance) == pytest.approx((strata[0][0].mean, strata[0][0].variance))


def test_epochs_add_their_own_variances():
    """Three epochs, of which the short one with equal shares is loud: pooled, its noise is lost among that of the others."""
    rng, false = np.random.default_rng(6), 0
    long = [(5_000, 0.02, 0.1), (5_000, 0.98, 0.1)]
    for _ in range(RUNS):
        strata = []
        for units, share, deviation in long:
            treated, values = rng.random(units) < share, deviation * rng.normal(size=units)
            strata.append((summarise(values[treated]), summarise(values[~treated])))
        treated, values, fired = rng.random(400) < 0.5, 8 * rng.normal(size=400), False
        for k in range(20, 401, 20):
            seen, in_treatment = values[:k], treated[:k]
            fired |= fires(*pool_strata([*strata, (summarise(seen[in_treatment]), summarise(seen[~in_treatment]))]), 50)
        false += fired
    assert false <= ALPHA * RUNS
    big = [
        (Summary(10**6, 0.3, 4.0), Summary(2 * 10**6, 0.1, 9.0)),
        (Summary(10**6, 0.0, 1.0), Summary(10**6, 0.1, 16.0)),
    ]
    first, second = pool_strata(big)
    weights = np.array([2 / 3, 1 / 2]) / (2 / 3 + 1 / 2)
    expected = sum(weights**2 * [4 / 10**6 + 9 / 2e6, 17 / 10**6])
    assert first.variance / first.n + second.variance / second.n == pytest.approx(expected, rel=1e-3)


def test_outcomes_that_drift_while_the_share_is_raised_are_no_harm():
    """5 %, 25 %, then half of the units; outcomes fall by half a deviation meanwhile, in both arms."""
    rng, shares = np.random.default_rng(5), np.repeat([0.05, 0.25, 0.5], 1_000)
    pooled = within = 0
    for _ in range(RUNS):
        values = rng.normal(size=3_000) - np.linspace(0, 0.5, 3_000)
        treated, alarms = rng.random(3_000) < shares, [False, False]
        for k in range(600, 3_001, 200):
            stages = [
                (values[a:b], treated[a:b])
                for a, b in ((0, 1_000), (1_000, 2_000), (2_000, 3_000))
                for b in [min(b, k)]
            ]
            strata = [(summarise(v[t]), summarise(v[~t])) for v, t in stages if len(v)]
            alarms[0] |= fires(summarise(values[:k][treated[:k]]), summarise(values[:k][~treated[:k]]), 20)
            alarms[1] |= fires(*pool_strata(strata), 20)
        pooled, within = pooled + alarms[0], within + alarms[1]
    assert within <= ALPHA * RUNS
    assert pooled > 0.5 * RUNS


def test_strata_that_all_agree_have_their_mean_exactly():
    # Rounded up by one place it would be no share of sessions any more, and every look would fail.
    counts = [(1870, 370), (1243, 1334), (238, 495), (153, 1587)]
    pair = pool_strata([(Summary(n, 1.0, 0.0), Summary(other, 1.0, 0.0)) for n, other in counts])
    assert [arm.mean for arm in pair] == [1.0, 1.0]
    assert not judge_reporting(*pair, min_outcomes=50, binary=True).alarm
