"""One question asks of one treatment whether it harms a metric, or whether it may be promoted.

This file chooses the test and runs it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, get_args

from marl_ray.config import ExperimentConfig
from marl_ray.config.serving.guardrails import GuardrailConfig
from marl_ray.config.serving.measures import RelativeMargin
from marl_ray.experiments.evidence.judged_units import BetQuestion
from marl_ray.experiments.evidence.looks import Look
from marl_ray.experiments.lifecycle import RampPlan
from marl_ray.experiments.statistics.bets import Claim, End, shifted_ends
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.missing_outcomes import nearer_end
from marl_ray.experiments.statistics.sequential import OneSided, judge_harm, judge_promotion, relative_scale

HARM, PROMOTION = -1, 1
"""Sides of a test: -1 is that a treatment is worse than the control, 1 that it is fit to replace it."""
ENDS: tuple[End, ...] = get_args(End)


@dataclass(frozen=True, slots=True)
class ArmTest:
    """The result of one test of one treatment at one look."""

    name: str
    """`outcome` or a guardrail's."""
    arm: str
    better: str
    """`higher` or `lower`."""
    margin: float
    """In units of the metric; a relative margin is multiplied by the control's mean so far."""
    alpha: float
    """The part of the experiment's alpha that this treatment gets."""
    treatment: Summary
    control: Summary
    """Summary of the control's observations: of units, clusters or blocks."""
    test: OneSided
    has_missing: bool = False
    """True if units without a report do not count; the proof then holds for the lowest and the highest values that they
    may have had."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric with the loss of it that is accepted."""

    name: str
    better: str
    margin: float | RelativeMargin
    is_binary: bool
    """True if every value is 0 or 1."""
    range: tuple[float, float] | None
    """The range for the exact test; None unless units are assigned one by one: means of clusters and blocks change
    while their units arrive, and blocks are not drawn one by one."""
    bounds: tuple[float, float] | None
    """The least and greatest value that counts or may come; None if nothing bounds the values."""

    @property
    def is_higher_better(self) -> bool:
        """True if greater values are better."""
        return self.better == "higher"

    @property
    def scale(self) -> float:
        """The factor that the control's mean is multiplied by."""
        margin = self.margin
        return relative_scale(margin.relative, self.is_higher_better) if isinstance(margin, RelativeMargin) else 1.0

    @property
    def absolute(self) -> float:
        """The margin in units of the metric; 0 if it is relative and therefore part of `scale`."""
        return self.margin if isinstance(self.margin, float) else 0.0

    def bet_question(self, side: int, treatment: str, control: str, missing: End | None = None) -> BetQuestion | None:
        """Return the question for the exact test; None if another test decides."""
        if self.range is None:
            return None
        claim = Claim(side, *self.range, self.absolute, self.is_higher_better, self.scale, missing)
        return BetQuestion(self.name, treatment, control, claim)


def outcome_of(config: ExperimentConfig) -> Measure:
    """Return the outcome as a measure; more of it is better."""
    return _measure(config, "outcome", "higher", config.margin, False)


def shown_outcome_of(config: ExperimentConfig) -> Measure:
    """Return the outcome as its difference is displayed, which is without a relative margin.

    Such a margin would multiply the control.
    """
    margin = config.margin if isinstance(config.margin, float) else 0.0
    return _measure(config, "outcome", "higher", margin, False)


def guardrail_of(config: ExperimentConfig, rail: GuardrailConfig) -> Measure:
    """Return a guardrail's metric as a measure."""
    # A cluster's mean of zeros and ones is neither 0 nor 1.
    binary = rail.is_binary and config.randomize == "session"
    return _measure(config, rail.name, rail.better, rail.margin, binary)


def bounded_difference(metric: str, bounds: tuple[float, float]) -> Measure:
    """Return the plain difference of a metric between units assigned one by one, for the exact test."""
    return Measure(metric, "higher", 0.0, False, bounds, bounds)


def _measure(config: ExperimentConfig, name: str, better: str, margin: float | RelativeMargin, binary: bool) -> Measure:
    metric_range = config.range_of(name)
    exact = metric_range if config.randomize == "session" else None
    return Measure(name, better, margin, binary, exact, (0.0, 1.0) if binary else metric_range)


def measures_without_missing(config: ExperimentConfig) -> list[str]:
    """Return the outcome and guardrails for which units without a report do not count."""
    rails = [rail.name for rail in config.guardrails if rail.name != "outcome" and rail.counts_missing_as is None]
    return ["outcome", *rails] if config.missing == "exclude" else rails


def bet_questions_of(config: ExperimentConfig, plan: RampPlan) -> tuple[BetQuestion, ...]:
    """Return all questions for the exact test in one look."""
    questions = dict.fromkeys(_bet_questions(config, plan))
    return tuple(question for question in questions if question is not None)


def _bet_questions(config: ExperimentConfig, plan: RampPlan) -> Iterator[BetQuestion | None]:
    missing = measures_without_missing(config)

    def both(measure: Measure, side: int, arm: str) -> Iterator[BetQuestion | None]:
        for end in (None, *ENDS) if measure.name in missing else (None,):
            yield measure.bet_question(side, arm, plan.control, end)

    for arm in plan.treatments:
        for measure in (outcome_of(config), shown_outcome_of(config)):
            for side in (HARM, PROMOTION):
                yield from both(measure, side, arm)
        for rail in config.guardrails:
            yield from both(guardrail_of(config, rail), HARM, arm)


class QuestionRules(TypedDict):
    """The keywords of `run_test`."""

    alpha: float
    """Probability that the test passes wrongly at any time."""
    min_outcomes: int
    """Values that each of both arms needs before the test is run."""
    excludes_missing: bool


def run_test(
    side: int,
    look: Look,
    measure: Measure,
    arm: str,
    plan: RampPlan,
    *,
    alpha: float,
    min_outcomes: int,
    excludes_missing: bool = False,
) -> ArmTest:
    """Test whether `HARM` or fitness for `PROMOTION` of a treatment is proven.

    With `excludes_missing`, units that do not report the metric do not count, so a proof must hold for the lowest and
    highest values that they may have had (`experiments/statistics/missing_outcomes.py`).
    """
    control = plan.control
    arms = len(plan.weights)
    treatment, other = look.pair(measure.name, arm, control, arms)
    relative = measure.margin.relative if isinstance(measure.margin, RelativeMargin) else None
    margin = relative * other.mean if relative is not None and other.n else measure.margin
    margin = margin if isinstance(margin, float) else 0.0
    reports = [share.mean for share in look.reporting.pair(measure.name, arm, control, arms)]
    missing = excludes_missing and min(reports) < 1
    sign = 1 if measure.is_higher_better else -1
    gain = sign * (treatment.mean - other.mean)
    arm_question = ArmQuestion(side, look, measure, arm, plan, alpha, min_outcomes)
    if min(treatment.n, other.n) < max(min_outcomes, 2) or margin < 0 or (relative is not None and not margin):
        # A relative margin of a mean that is not above 0 is meaningless.
        evidence = OneSided(gain, -side * math.inf, 1.0, False)
    elif missing:
        evidence = min(
            (arm_question.test_with_missing_at(end, margin * reports[0]) for end in ENDS), key=lambda test: test.e_value
        )
        # The test is of the gain per judged unit, including units that do not report, against 0.
        evidence = evidence._replace(gain=gain, bound=evidence.bound / reports[0] - margin)
    else:
        evidence = arm_question.test_reported_units()
        # The test is of "treatment - 0.98 control" if the margin is a part of the control's mean.
        evidence = evidence._replace(gain=gain, bound=evidence.bound - (0.0 if relative is None else margin))
    return ArmTest(measure.name, arm, measure.better, max(margin, 0.0), alpha, treatment, other, evidence, missing)


@dataclass(frozen=True, slots=True)
class ArmQuestion:
    """One question about one treatment, and the numbers to answer it with."""

    side: int
    """`HARM` or `PROMOTION`."""
    look: Look
    measure: Measure
    arm: str
    plan: RampPlan
    alpha: float
    min_outcomes: int

    @property
    def arms(self) -> tuple[str, str]:
        """The treatment and the control."""
        return self.arm, self.plan.control

    @property
    def _comparison(self) -> tuple[str, str, str, int]:
        """The arguments with which a look finds the numbers of the treatment and of the control."""
        return self.measure.name, *self.arms, len(self.plan.weights)

    def test_reported_units(self) -> OneSided:
        """Test only the units that count."""
        measure = self.measure
        if measure.range is not None:
            return self._bet(None)
        pair = self.look.pair(*self._comparison, measure.scale)
        arms = self._summaries()
        binary = measure.is_binary and all(_may_be_binary(summary) for summary in arms)
        evidence = self._test(pair, measure.absolute, binary, measure.scale)
        if not binary and _are_zeros_and_ones(arms):
            # The range is not declared, so other values may come. But a rare event that happened not to occur must not
            # look impossible.
            evidence = min(
                evidence, self._test(pair, measure.absolute, True, measure.scale), key=lambda test: test.e_value
            )
        return evidence

    def test_with_missing_at(self, end: End, margin: float) -> OneSided:
        """Test all judged units with the missing ones at this end of the range, for a gain above or below 0.

        `margin` is roughly the value of that gain per unit of the treatment, reported or not.
        """
        if self.measure.range is not None:
            return self._bet(end)
        reported = self.look.pooled_moments(self.measure.name, *self.arms)
        if not reported.low < reported.high:
            # All values are equal so far, so the only difference would be chance in who reports, and it would count
            # against the margin.
            return OneSided(math.nan, -self.side * math.inf, 1.0, False)
        are_events = _are_zeros_and_ones(self._summaries())
        evidence = self._test(self._fill_missing(end, nearer=not are_events), 0.0)
        if are_events:
            events = self.look.filled_summaries(*self._comparison, value=float(ENDS.index(end)), shift=0.0, scale=1.0)
            other = self._test(events, margin, True)
            evidence = min(evidence, other._replace(bound=other.bound + margin), key=lambda test: test.e_value)
        return evidence

    def _summaries(self) -> list[Summary]:
        return [self.look.summary(self.measure.name, arm) for arm in self.arms]

    def _fill_missing(self, end: End, nearer: bool) -> tuple[Summary, Summary]:
        """Return the summaries of all judged units, with the missing ones at this end of the range.

        With `nearer` they are nearer to the mean if that costs less.
        """
        look = self.look
        measure = self.measure
        comparison = self._comparison
        reported = look.pooled_moments(measure.name, *self.arms)
        low, high = reported.low, reported.high
        if measure.bounds is not None:
            low, high = min(low, measure.bounds[0]), max(high, measure.bounds[1])
        shift = measure.absolute if measure.is_higher_better else -measure.absolute
        scale = measure.scale
        value = shifted_ends(low, high, shift, scale)[ENDS.index(end)]
        if nearer:
            value = nearer_end(reported, value, look.pair(*comparison), look.reporting.pair(*comparison))
        treatment, other = look.filled_summaries(*comparison, value=value, shift=shift, scale=scale)
        # At the high end the arm that is claimed to be the larger one may be so by what lies beyond it; at the low end the
        # other one may be the smaller one by that.
        of_treatment, of_other = look.mean_excess(*comparison, value=value, end=end, shift=shift, scale=scale)
        back = -1 if end == "high" else 1
        if ((self.side == PROMOTION) == measure.is_higher_better) == (end == "high"):
            return replace(treatment, mean=treatment.mean + back * of_treatment), other
        return treatment, replace(other, mean=other.mean + back * of_other)

    def _bet(self, end: End | None) -> OneSided:
        bet_question = self.measure.bet_question(self.side, self.arm, self.plan.control, end)
        assert bet_question is not None
        # Before the first unit that lacks the metric has bet, both ends equal the reports so far.
        evidence = (
            self.look.bets.get(bet_question)
            or self.look.bets[replace(bet_question, claim=replace(bet_question.claim, missing=None))]
        )
        log_e = evidence.log_e
        bound = evidence.bound(self.alpha)
        return OneSided(math.nan, bound, math.exp(min(log_e, 700.0)), log_e >= -math.log(self.alpha))

    def _test(self, pair: tuple[Summary, Summary], margin: float, binary: bool = False, scale: float = 1.0) -> OneSided:
        test = judge_harm if self.side == HARM else judge_promotion
        return test(
            *pair,
            alpha=self.alpha,
            margin=margin,
            min_outcomes=self.min_outcomes,
            higher_is_better=self.measure.is_higher_better,
            binary=binary,
            scale=scale,
        )


def _are_zeros_and_ones(arms: Sequence[Summary]) -> bool:
    """Return True if all values so far are 0 or 1, and both have occurred."""
    mean = sum(arm.n * arm.mean for arm in arms) / sum(arm.n for arm in arms)
    return 0 < mean < 1 and all(
        _may_be_binary(arm) and arm.variance * (arm.n - 1) >= arm.n * arm.mean * (1 - arm.mean) * (1 - 1e-6) - 1e-9
        for arm in arms
    )


def _may_be_binary(summary: Summary) -> bool:
    """Return True if all values may be 0 or 1.

    Values between them would vary less than zeros and ones, and values beyond them more.
    """
    # A metric that counts errors must neither get a test with too small a variance nor stop all tests.
    largest = summary.n * summary.mean * (1 - summary.mean)
    return not summary.n or (
        0 <= summary.mean <= 1 and summary.variance * (summary.n - 1) <= largest * (1 + 1e-6) + 1e-12
    )
