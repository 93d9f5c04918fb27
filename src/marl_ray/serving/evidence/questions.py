"""One question to one treatment: does it harm a metric, or may it be promoted? Which test answers, and what it found."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from marl_ray.config import ExperimentConfig
from marl_ray.config.experiment import GuardrailConfig
from marl_ray.config.measures import RelativeMargin
from marl_ray.experiments.judged import Question
from marl_ray.experiments.looks import Look
from marl_ray.experiments.reporting import allowance
from marl_ray.experiments.sequential import OneSided, harm, promotion, relative_scale
from marl_ray.experiments.states import Plan
from marl_ray.experiments.statistics import Summary

HARM, PROMOTION = -1, 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test says of one treatment now."""

    name: str
    """`outcome` or a guardrail's."""
    arm: str
    better: str
    """`higher` or `lower`."""
    margin: float
    """In units of the metric; of a relative margin that part of the control's mean so far."""
    alpha: float
    """The treatment's part of it."""
    treatment: Summary
    control: Summary
    """Observations: of units, clusters or blocks."""
    test: OneSided
    """Holds whichever units are missing in one arm only."""
    allowance: float = 0.0
    """How far the means may be off by these, which the test has allowed for."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric, and what is accepted of it."""

    name: str
    better: str
    margin: float | RelativeMargin
    binary: bool
    range: tuple[float, float] | None
    """For the exact test, which only units assigned by themselves have: means of clusters and blocks change while their
    units come, and blocks are not drawn one by one."""

    @property
    def higher(self) -> bool:
        return self.better == "higher"

    @property
    def scale(self) -> float:
        """What the control is multiplied by."""
        margin = self.margin
        return relative_scale(margin.relative, self.higher) if isinstance(margin, RelativeMargin) else 1.0

    def question(self, side: int, treatment: str, control: str) -> Question | None:
        """What the exact test is asked; None if another test answers."""
        if self.range is None:
            return None
        margin = self.margin if isinstance(self.margin, float) else 0.0
        return Question(self.name, treatment, control, side, *self.range, margin, self.higher, self.scale)


def outcome_of(config: ExperimentConfig) -> Measure:
    """The outcome, of which more is better."""
    return Measure("outcome", "higher", config.margin, False, _range(config, "outcome"))


def plain_outcome_of(config: ExperimentConfig) -> Measure:
    """The outcome without a margin: the difference itself."""
    return Measure("outcome", "higher", 0.0, False, _range(config, "outcome"))


def guardrail_of(config: ExperimentConfig, rail: GuardrailConfig) -> Measure:
    """A guardrail's metric."""
    # The mean of a cluster is not 0 or 1.
    binary = rail.is_binary and config.randomize == "session"
    return Measure(rail.name, rail.better, rail.margin, binary, _range(config, rail.name))


def _range(config: ExperimentConfig, metric: str) -> tuple[float, float] | None:
    return config.range_of(metric) if config.randomize == "session" else None


def questions_of(config: ExperimentConfig, plan: Plan) -> tuple[Question, ...]:
    """Everything that the exact test is asked in one look."""
    asked = dict.fromkeys(_questions(config, plan))
    return tuple(question for question in asked if question is not None)


def _questions(config: ExperimentConfig, plan: Plan) -> Iterator[Question | None]:
    outcome = outcome_of(config)
    # Bounds of the plain difference are of the same bets, unless a relative margin scales the control.
    shown = (outcome,) if outcome.scale == 1 else (outcome, plain_outcome_of(config))
    for arm in plan.treatments:
        for measure in shown:
            yield from (measure.question(side, arm, plan.control) for side in (HARM, PROMOTION))
        for rail in config.guardrails:
            yield guardrail_of(config, rail).question(HARM, arm, plan.control)


def ask(
    side: int,
    look: Look,
    measure: Measure,
    arm: str,
    plan: Plan,
    *,
    alpha: float,
    min_outcomes: int,
    excluding: bool = False,
) -> Finding:
    """Whether `HARM` or fitness for `PROMOTION` is proven of a treatment. `excluding`: units that do not report the metric
    do not count in it, so what is proven must hold whichever are missing (`reporting.allowance`)."""
    control, arms = plan.control, len(plan.weights)
    one, other = look.pair(measure.name, arm, control, arms)
    relative = measure.margin.relative if isinstance(measure.margin, RelativeMargin) else None
    margin = relative * other.mean if relative is not None and other.n else measure.margin
    margin = margin if isinstance(margin, float) else 0.0
    reports = look.reporting.pair(measure.name, arm, control, arms)
    allowed = allowance(one, other, *reports, bounds=measure.range) if excluding else 0.0
    sign = 1 if measure.higher else -1
    gain = sign * (one.mean - other.mean)
    question = measure.question(side, arm, control)
    if min(one.n, other.n) < max(min_outcomes, 2) or margin < 0 or (relative is not None and not margin):
        # A part of a mean that is not above 0 is no margin.
        found = OneSided(gain, -side * math.inf, 1.0, False)
    elif question is not None:
        evidence = look.bets[question]
        log_e = evidence.against(side * allowed - question.margin) if allowed else evidence.log_e
        bound = evidence.bound(alpha) - side * allowed - _shift(relative, margin)
        found = OneSided(gain, bound, math.exp(min(log_e, 700.0)), log_e >= -math.log(alpha))
    else:
        first, second = look.pair(measure.name, arm, control, arms, measure.scale)
        binary = measure.binary and all(_may_be_binary(look.summary(measure.name, of)) for of in (arm, control))
        moved = first.mean - sign * side * allowed
        moved = min(max(moved, 0.0), 1.0) if binary else moved
        test = harm if side == HARM else promotion
        found = test(
            replace(first, mean=moved),
            second,
            alpha=alpha,
            margin=margin if relative is None else 0.0,
            min_outcomes=min_outcomes,
            higher_is_better=measure.higher,
            binary=binary,
            scale=measure.scale,
        )
        found = OneSided(gain, found.bound - _shift(relative, margin), found.e_value, found.proven)
    return Finding(measure.name, arm, measure.better, max(margin, 0.0), alpha, one, other, found, allowed)


def _shift(relative: float | None, margin: float) -> float:
    """From bounds of "treatment - 0.98 control" to those that are held against the margin."""
    return 0.0 if relative is None else margin


def _may_be_binary(found: Summary) -> bool:
    """Whether all values may be 0 or 1: numbers between them vary no more than these would, numbers beyond do."""
    # A client that counts its errors must not get a test whose variance is too small, nor stop all tests.
    largest = found.n * found.mean * (1 - found.mean)
    return not found.n or (0 <= found.mean <= 1 and found.variance * (found.n - 1) <= largest * (1 + 1e-6) + 1e-12)
