"""The exact test of outcomes with bounds: against a plain loop, by all coins, and in simulations."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics.bets import (
    EFFECTS,
    MAX_STAKE,
    PRIOR_WEIGHT,
    BettingTest,
    Capital,
    Claim,
    OutcomeMoments,
)


def capital_by_loop(side: int, null: float, y: list[float], treated: list[bool], share: list[float]) -> float:
    """ln K of one null, unit by unit as the docstring has it."""
    capital = [1.0] * len(EFFECTS)
    n, total, squares = PRIOR_WEIGHT, PRIOR_WEIGHT / 2, PRIOR_WEIGHT / 4
    for value, is_treated, q in zip(y, treated, share, strict=True):
        m, s = total / n, math.sqrt(squares / n)
        z = side * ((value - m) / q if is_treated else -(value - m) / (1 - q))
        worst = max(m / q, (1 - m) / (1 - q)) if side > 0 else max((1 - m) / q, m / (1 - q))
        for k, effect in enumerate(EFFECTS):
            stake = min(effect * q * (1 - q) / s, MAX_STAKE / max(worst + side * null, worst / 2))
            capital[k] *= 1 + stake * (z - side * null)
        n, total, squares = n + 1, total + value, squares + (value - m) ** 2
    return math.log(sum(capital) / len(capital))


def evidence(side: int, null: float, y: Any, treated: Any, share: Any) -> float:
    memory, capital = OutcomeMoments(), Capital(side, np.array([null]))
    values = np.asarray(y, float)
    capital.bet(values, np.asarray(treated, bool), np.asarray(share, float), *memory.centers(values))
    return float(capital.log_evidence()[0])


UNITS = st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.floats(0.02, 0.98)), min_size=1, max_size=80)


@given(UNITS, st.sampled_from([-1, 1]), st.floats(-1, 1))
def test_capital_is_the_loops(units, side, null):
    y, treated, share = zip(*units, strict=True)
    assert evidence(side, null, y, treated, share) == pytest.approx(
        capital_by_loop(side, null, *map(list, (y, treated, share)))
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.02, 0.98)), min_size=1, max_size=7),
    st.sampled_from([-1, 1]),
    st.floats(-1, 1),
)
def test_over_all_coins_the_capital_is_one_at_most_whatever_the_outcomes_are(units, side, effect):
    """Both potential outcomes of every unit are fixed; only the coin is chance, and the game is fair or worse."""
    control = [value for value, _, _ in units]
    # The treatment is worse (side 1) than the control plus the effect, or just so.
    treatment = [min(max(c + effect - side * x * 0.3, 0.0), 1.0) for c, x, _ in units]
    null = (max if side > 0 else min)(t - c for t, c in zip(treatment, control, strict=True))
    share = [q for _, _, q in units]
    mean = 0.0
    for coins in itertools.product([True, False], repeat=len(units)):
        chance = math.prod(q if is_treated else 1 - q for is_treated, q in zip(coins, share, strict=True))
        y = [t if is_treated else c for is_treated, t, c in zip(coins, treatment, control, strict=True)]
        mean += chance * math.exp(evidence(side, null, y, coins, share))
    assert mean <= 1 + 1e-9
    if max(t - c for t, c in zip(treatment, control, strict=True)) == min(
        t - c for t, c in zip(treatment, control, strict=True)
    ):
        assert mean == pytest.approx(1)


@given(UNITS, st.integers(0, 80), st.sampled_from([-1, 1]), st.booleans(), st.floats(0, 2))
def test_the_test_does_not_depend_on_when_it_is_looked_at_nor_on_units(units, first_units, side, higher, margin):
    y, treated, share = (np.array(part) for part in zip(*units, strict=True))
    single, parts = (BettingTest(Claim(side, -3.0, 7.0, 10 * margin, higher)) for _ in range(2))
    single.add(10 * y - 3, treated, share)
    for part in (slice(0, first_units), slice(first_units, None)):
        parts.add(10 * y[part] - 3, treated[part], share[part])
    assert parts.evidence().log_e == pytest.approx(single.evidence().log_e, rel=1e-9, abs=1e-9)
    plain = BettingTest(Claim(side, 0.0, 1.0, margin, higher))
    plain.add(y, treated, share)
    assert plain.evidence().log_e == pytest.approx(single.evidence().log_e, rel=1e-6, abs=1e-6)
    # Smaller is better is the same of the negated outcomes.
    turned = BettingTest(Claim(side, -7.0, 3.0, 10 * margin, not higher))
    turned.add(3 - 10 * y, treated, share)
    assert turned.evidence().log_e == pytest.approx(single.evidence().log_e, rel=1e-6, abs=1e-6)
    # The bound proves what the evidence proves.
    bound = single.evidence().bound(0.05)
    if abs(single.evidence().log_e - math.log(20)) > 1e-6 and margin <= 1:
        assert (side * (bound + 10 * margin) > 0) == (single.evidence().log_e > math.log(20))


def draw(rng: np.random.Generator, n: int, q: Any, treatment: Any, control: Any) -> tuple[np.ndarray, ...]:
    share = np.broadcast_to(q, n).astype(float)
    treated = rng.random(n) < share
    return np.where(treated, treatment, control).astype(float), treated, share


def proven(test: BettingTest, units: tuple[np.ndarray, ...], step: int = 40) -> int | None:
    """Units at the first look that proves; None if none does."""
    for at in range(0, len(units[0]), step):
        test.add(*(part[at : at + step] for part in units))
        if test.evidence().log_e >= math.log(20):
            return at + step
    return None


def test_rare_large_losses_do_not_promote_a_worse_arm():
    """One unit in a thousand loses 100 deviations: the mean is below the margin, nearly no sample shows it."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(60):
        n = 3_000
        losses = np.where(rng.random(n) < 0.001, 100.0, 0.0)
        units = draw(rng, n, 0.5, rng.standard_normal(n) - losses, rng.standard_normal(n))
        wrong += proven(BettingTest(Claim(1, -110.0, 10.0, 0.1)), units) is not None
    assert wrong <= 3


def test_false_rollbacks_of_drifting_ramps_are_rare_and_real_harm_is_found():
    rng, wrong, harms = np.random.default_rng(1), 0, []
    ramp = np.repeat([0.05, 0.25, 0.5], 800)
    for _ in range(80):
        day = (np.sin(np.arange(2_400) / 200) + 1) / 2 * 0.8
        base = rng.random(2_400)
        same = (base < 0.1 + day).astype(float)
        wrong += proven(BettingTest(Claim(-1, 0.0, 1.0, 0.0)), draw(rng, 2_400, ramp, same, same)) is not None
        worse = (base < 0.05 + day * 0.6).astype(float)
        harms.append(proven(BettingTest(Claim(-1, 0.0, 1.0, 0.0)), draw(rng, 2_400, ramp, worse, same)) is not None)
    assert wrong <= 8  # 5 % of 80 is 4
    assert np.mean(harms) > 0.9


def test_bounds_cover_the_effect_and_close_in_on_it():
    rng, missed, widths = np.random.default_rng(2), 0, []
    for _ in range(60):
        n = 4_000
        units = draw(rng, n, 0.3, rng.beta(3, 2, n), rng.beta(2, 2, n))
        low, high = BettingTest(Claim(1, 0.0, 1.0, 0.0)), BettingTest(Claim(-1, 0.0, 1.0, 0.0))
        for test in (low, high):
            test.add(*units)
        lower, other = low.evidence().bound(0.025), high.evidence().bound(0.025)
        missed += not lower < 0.1 < other
        widths.append(other - lower)
    assert missed <= 6
    assert 0.02 < np.median(widths) < 0.07
    assert BettingTest(Claim(1, 0.0, 1.0, 0.0)).evidence().bound(0.05) == -math.inf
    assert BettingTest(Claim(-1, 0.0, 1.0, 0.0)).evidence().bound(0.05) == math.inf


def test_an_interpolated_bound_is_the_refuted_null():
    rng = np.random.default_rng(3)
    units = draw(rng, 2_000, 0.5, rng.beta(3, 2, 2_000), rng.beta(2, 2, 2_000))
    for side in (1, -1):
        test = BettingTest(Claim(side, 0.0, 1.0, 0.0))
        test.add(*units)
        bound = test.evidence().bound(0.05)
        assert (
            evidence(side, bound - side * 0.004, *units) > math.log(20) > evidence(side, bound + side * 0.004, *units)
        )


@pytest.mark.parametrize("higher", [True, False])
def test_a_relative_margin_scales_the_control(higher):
    """The control's mean is 0.5; a treatment that is 10 % worse is within 20 % of it and not within 5 %."""
    rng, n = np.random.default_rng(4), 12_000
    other = 0.45 if higher else 0.55
    units = draw(rng, n, 0.5, rng.random(n) < other, rng.random(n) < 0.5)
    for part, within in ((0.2, True), (0.05, False)):
        scale = 1 - part if higher else 1 + part
        good, bad = (BettingTest(Claim(side, 0.0, 1.0, 0.0, higher, scale)) for side in (1, -1))
        for test in (good, bad):
            test.add(*units)
        assert (good.evidence().log_e > math.log(20)) == within
        assert not within or bad.evidence().log_e < 0


def test_values_outside_are_moved_into_the_bounds_and_bounds_are_checked():
    first, other = (BettingTest(Claim(1, 0.0, 1.0, 0.0)) for _ in range(2))
    share = np.full(3, 0.5)
    first.add(np.array([5.0, -9.0, 0.5]), np.array([True, False, True]), share)
    other.add(np.array([1.0, 0.0, 0.5]), np.array([True, False, True]), share)
    assert first.evidence().log_e == other.evidence().log_e
    for low, high in ((1.0, 1.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(MarlRayError, match="bounds: expected finite low < high"):
            BettingTest(Claim(1, low, high, 0.0))
