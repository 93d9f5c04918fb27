"""The choice of the test that answers a question about an arm, without any database."""

import math
from dataclasses import replace
from random import Random
from statistics import NormalDist, fmean

import pytest

from marl_ray.config.serving.measures import RelativeMargin
from marl_ray.experiments.evidence.looks import Look, look_at
from marl_ray.experiments.evidence.running_sums import LookSettings, Totals
from marl_ray.experiments.lifecycle import RampPlan
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.missing_outcomes import mean_excess_beyond
from marl_ray.experiments.statistics.moments import Moments
from marl_ray.experiments.statistics.sequential import judge_harm, judge_promotion, scale_summary
from marl_ray.serving.ramp_decisions.questions import HARM, PROMOTION, ArmTest, Measure, run_test

PLAN = RampPlan("c", {"c": 9.0, "t": 1.0})
PLAIN = Measure("outcome", "higher", 0.02, False, None, None)


def answer_to(side: int, treatment: Summary, control: Summary, measure: Measure = PLAIN) -> ArmTest:
    arms = {"t": treatment, "c": control}
    return run_test(
        side, Look({"outcome": arms}, {"outcome": {1: arms}}), measure, "t", PLAN, alpha=0.05, min_outcomes=50
    )


def events(n: int, ones: int) -> Summary:
    return Summary(n, ones / n, ones * (n - ones) / n / (n - 1))


def test_a_canary_whose_rare_failures_were_missed_by_luck_is_not_promoted():
    canary, control = events(150, 150), events(1_350, 1_336)
    rules = {"alpha": 0.05, "margin": 0.02, "min_outcomes": 50}
    assert judge_promotion(canary, control, **rules).proven and not answer_to(PROMOTION, canary, control).test.proven
    assert (
        answer_to(PROMOTION, canary, control).test
        == answer_to(PROMOTION, canary, control, replace(PLAIN, is_binary=True)).test
    )
    # Another value, or none but ones: not such outcomes, and as uncertain as any.
    other = Summary(1_350, control.mean, control.variance * 1.01)
    assert answer_to(PROMOTION, canary, other).test == judge_promotion(canary, other, **rules)
    assert not answer_to(PROMOTION, canary, events(1_350, 1_350)).test.proven


def test_many_events_are_judged_as_they_were():
    first, other = events(2_000, 900), events(2_000, 1_100)
    assert answer_to(HARM, first, other).test.proven
    assert not answer_to(HARM, other, first).test.proven and answer_to(PROMOTION, other, first).test.proven


@pytest.mark.parametrize(("better", "scale"), [("higher", 0.9), ("lower", 1.1)])
def test_a_relative_margin_is_a_contrast_with_the_control_times_a_number(better, scale):
    control, measure = (
        Summary(900, 2.0, 1.5),
        Measure("outcome", better, RelativeMargin(relative=0.1), False, None, None),
    )
    for mean in (1.6, 1.8, 1.9, 2.0, 2.1, 2.2, 2.4):
        treatment = Summary(900, mean, 1.4)
        for side, test in ((HARM, judge_harm), (PROMOTION, judge_promotion)):
            rules = {"alpha": 0.05, "margin": 0.0, "min_outcomes": 50, "higher_is_better": better == "higher"}
            expected, answer = (
                test(treatment, scale_summary(control, scale), **rules),
                answer_to(side, treatment, control, measure),
            )
            assert (answer.test.e_value, answer.test.proven) == (expected.e_value, expected.proven)
            assert answer.margin == pytest.approx(0.2) and answer.test.bound == pytest.approx(expected.bound - 0.2)


def units(**reports: tuple[int, int, int]) -> Look:
    """Arm -> units, and of these the ones that reported 1 and 0."""
    values = {}
    for arm, (_, ones, zeros) in reports.items():
        mean, n = ones / (ones + zeros), ones + zeros
        values[arm] = Moments(n, mean, n * mean * (1 - mean), 1.0 if not zeros else 0.0, 0.0 if not ones else 1.0)
    return look_of({arm: n for arm, (n, _, _) in reports.items()}, values)


def look_of(counts: dict[str, int], reported: dict[str, Moments]) -> Look:
    """By arm, how many units are judged, and what these have reported."""
    judged = {(1, arm, "", True): n for arm, n in counts.items()}
    values = {("outcome", 1, arm, "", True): moments for arm, moments in reported.items()}
    return look_at(Totals({key[:3]: n for key, n in judged.items()}, judged, values), LookSettings(), 0.0)


@pytest.mark.parametrize(
    ("treatment", "control", "proven"),
    [
        ((20_000, 600, 9_500), (20_000, 860, 9_500), False),  # it loses successes, or is slower
        ((20_000, 1_300, 9_060), (20_000, 2_000, 8_360), True),  # as many report, and fewer succeed
        ((20_000, 1_000, 12_000), (20_000, 1_000, 9_500), False),  # more failures come
        ((20_000, 760, 12_000), (20_000, 1_000, 9_500), True),  # and fewer successes
    ],
)
def test_harm_must_hold_whatever_the_excess_of_reports_was(treatment, control, proven):
    rules = {"alpha": 0.05, "min_outcomes": 50}
    answer = run_test(
        HARM, units(t=treatment, c=control), replace(PLAIN, margin=1e-4), "t", PLAN, excludes_missing=True, **rules
    )
    assert answer.has_missing and answer.test.proven is proven
    assert answer.test.proven == (answer.test.bound < -1e-4)
    # Of those who report alone, all four are harm.
    assert run_test(HARM, units(t=treatment, c=control), replace(PLAIN, margin=1e-4), "t", PLAN, **rules).test.proven


def test_a_canary_whose_failures_may_be_missing_is_not_promoted_by_luck():
    rules = {"alpha": 0.05, "min_outcomes": 50, "excludes_missing": True}
    for n, proven in ((300, False), (400, True)):
        look = units(t=(n, n - 3, 1), c=(9 * n, round(8.865 * n), round(0.09 * n)))
        answer = run_test(PROMOTION, look, PLAIN, "t", PLAN, **rules)
        assert answer.has_missing and answer.test.proven is proven and answer.test.proven == (answer.test.bound > -0.02)


@pytest.mark.parametrize(("ones", "zeros"), [(0, 360), (360, 0)])
def test_outcomes_that_were_all_alike_prove_nothing_however_many_are_missing(ones, zeros):
    # The control succeeds in one of 200 sessions, and has not yet; the treatment never does.
    look = units(t=(400, ones, zeros), c=(400, ones, zeros))
    for side in (HARM, PROMOTION):
        rules = {"alpha": 0.05, "min_outcomes": 50, "excludes_missing": True}
        assert not run_test(side, look, replace(PLAIN, margin=0.005), "t", PLAN, **rules).test.proven


def payments(n: int, left_out: float = 0.0, times: float = 1.0) -> Moments:
    """Log-normal numbers at even quantiles, without this share of the largest."""
    amounts = [times * math.exp(NormalDist().inv_cdf((k + 0.5) / n)) for k in range(n)][: n - round(left_out * n)]
    mean = fmean(amounts)
    return Moments(len(amounts), mean, sum((x - mean) ** 2 for x in amounts), amounts[0], amounts[-1])


@pytest.mark.parametrize(("side", "better"), [(HARM, "higher"), (PROMOTION, "higher"), (HARM, "lower")])
def test_a_long_tail_does_not_hide_a_large_effect_where_few_are_missing(side, better):
    few, more = payments(1_500), payments(1_500, times=1.5)
    lower_treatment = (side == HARM) == (better == "higher")
    reported = {"t": few, "c": more} if lower_treatment else {"t": more, "c": few}
    rules = {"alpha": 0.05, "min_outcomes": 50, "excludes_missing": True}
    measure = replace(PLAIN, better=better, margin=0.1)
    answer = run_test(side, look_of({"t": 1_579, "c": 1_579}, reported), measure, "t", PLAN, **rules)
    assert answer.has_missing and answer.test.proven
    assert answer.test.bound < -0.1 if side == HARM else answer.test.bound > -0.1


@pytest.mark.parametrize(("side", "loser"), [(HARM, "t"), (PROMOTION, "c")])
def test_the_largest_of_a_long_tail_may_be_what_one_arm_has_lost(side, loser):
    # Else the arms are alike, and one in twenty is missing in both.
    arms = {arm: payments(10_000, 0.01 if arm == loser else 0.0) for arm in "tc"}
    look, measure = look_of({"t": 10_526, "c": 10_526}, arms), replace(PLAIN, margin=1e-6)
    rules = {"alpha": 0.05, "min_outcomes": 50}
    assert run_test(side, look, measure, "t", PLAN, **rules).test.proven
    assert not run_test(side, look, measure, "t", PLAN, excludes_missing=True, **rules).test.proven


def test_no_numbers_lie_further_beyond_than_told():
    rng = Random(1)
    for _ in range(200):
        numbers = [rng.choice((rng.gauss(0, 1), rng.lognormvariate(0, 2), 3.0)) for _ in range(rng.randint(1, 9))]
        mean, value = fmean(numbers), rng.gauss(0, 3)
        moments = Moments(len(numbers), mean, sum((x - mean) ** 2 for x in numbers), min(numbers), max(numbers))
        assert mean_excess_beyond(moments, value, "high") >= fmean(max(x - value, 0) for x in numbers) - 1e-9
        assert mean_excess_beyond(moments, value, "low") >= fmean(max(value - x, 0) for x in numbers) - 1e-9
