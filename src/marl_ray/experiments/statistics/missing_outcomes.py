"""Missing outcomes of units whose windows are over: an alarm, and bounds on their effect.

If units without an outcome do not count (`missing: exclude`), the means are those of the units that reported. If an arm
loses its clients before they report, or if its outcomes come too late, other kinds of units are compared with the
control's: 41 happy sessions of 410 are no evidence. Two things follow.

**The alarm** (`judge_reporting`). Each unit is 1 if it has reported and 0 if not (of a cluster or block, its units'
mean). Both one-sided tests of `sequential.judge_harm` with margin 0 and half of alpha each ask whether one arm does so
less often than the other, within epochs, with the exact variance of shares where units are assigned by themselves. That is
more powerful than comparing the counts of reports with the shares of units (`sample_ratio`) where nearly all units report:
950 reports of 1,000 units are no surprise beside 1,000 of 1,000 as shares of 1,950, and a great one as units.

**Both ends** (`questions.run_test`). Missing outcomes move the mean as soon as they are missing, and the alarm
needs its time. So as soon as any judged unit has not reported, harm and promotion are tested on all judged units, twice:
with every missing outcome of both arms at the low end c of the range of the metric, and at the high end. A claim that both
tests prove is proven, and no share has to be estimated.

This suffices for the following reason. Let R be 1 for a unit that reports and 0 for one that does not, and y its
outcome, moved by the margin in the treatment. With the missing ones at c a unit counts c + R (y - c), so arms are
compared by their sums of R (y - c). Suppose that an arm makes no unit report that would not report with the other arm:
it only loses reports, or delays them, of any kind of unit (monotone selection, Lee, Review of Economic Studies 76,
2009, assumption 2). Then one arm's reports are those of units that report with either arm, plus an excess. If the
treatment is no worse among the units that report with either, that holds for their sums of R (y - c) at either end. An
excess of the control's lowers its sum of R (y - high), because every term is 0 or less, and an excess of the
treatment's raises its sum of R (y - low). So at one of the ends, known or not, the treatment is no worse over all
units, the test of that end errs with alpha at most, and both together not more often (an intersection-union test,
Berger, Technometrics 24, 1982). Promotion is the same with the arms exchanged.

The range is the metric's bounds. Where it has none it is from the smallest to the largest value that either arm's judged
units have reported: the excess is among these. The further the range, the longer both ends take: a missing unit counts as
the largest of all payments, and by chance never equally many are missing. So where the tail is long an end may lie nearer
(`nearer_end`). With the missing ones at c the excess of U, the arm that is claimed to be the larger one, can then raise its
sum of R (y - c), by the part of its reports above c at most; the mean of (y - c)+ is no more than

    (sqrt(s^2 + (c - m)^2) - (c - m)) / 2

for any values of mean m and variance s^2 (Scarf, A min-max solution of an inventory problem, 1958), those of the sample
among them. U's mean is lowered by that, and the same holds below the low end of the other arm.

No test can see the following. Half of all units are successes in either arm. The one arm reports its successes with the
chance a and its failures with the chance b, the other the other way round. Both report (a + b) / 2 of their units, and
the parts of successes among their reports are a / (a + b) and b / (a + b). Two arms that report every unit with the
chance (a + b) / 2, and of which these parts really are successes, look the same with the same chances: there the arms
differ, here they do not. So a user who cannot rule out that arms lose different kinds of units must declare the value
of a missing outcome.
"""

import math
from typing import NamedTuple

from marl_ray.experiments.statistics.bets import End
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.moments import Moments
from marl_ray.experiments.statistics.sequential import judge_harm

ALARM_LEVEL = 0.01
"""Level of the alarm. A false one holds an experiment until a person looks at it; a missed one lets missing outcomes decide,
so it is above that of the sample ratio."""
PROOF_ERRORS = 3.0
"""Number of standard errors that a proof takes, roughly; `nearer_end` weighs costs with it."""
CANDIDATE_ENDS = 24
"""Number of candidate ends that `nearer_end` compares."""


class ReportingTest(NamedTuple):
    """Result of the test that both arms' units report equally often."""

    p_value: float
    """Valid at all times."""
    alarm: bool


def judge_reporting(
    treatment: Summary, control: Summary, *, min_outcomes: int, binary: bool, alpha: float = ALARM_LEVEL
) -> ReportingTest:
    """Test that neither arm reports less than the other.

    `binary` says that observations are 0 or 1, of units assigned by themselves; else they are means of clusters or blocks.
    """
    tests = [
        judge_harm(left, right, alpha=alpha / 2, margin=0.0, min_outcomes=min_outcomes, binary=binary)
        for left, right in ((treatment, control), (control, treatment))
    ]
    return ReportingTest(min(1.0, 2 * min(test.p_value for test in tests)), any(test.proven for test in tests))


def mean_excess_beyond(reported: Moments, value: float, end: End) -> float:
    """Return the largest mean that the parts of these numbers above `value` (below it at the low end) can have."""
    gap, room = (
        (value - reported.mean, reported.high - value)
        if end == "high"
        else (reported.mean - value, value - reported.low)
    )
    if not reported.n or room <= 0:
        return 0.0
    return max(math.hypot(math.sqrt(reported.squares / reported.n), gap) - gap, 0.0) / 2


def nearer_end(
    reported: Moments, furthest: float, pair: tuple[Summary, Summary], reports: tuple[Summary, Summary]
) -> float:
    """Return the value that a missing outcome has at one end of its range, at the least cost.

    The value is `furthest`, or a number between it and the mean that costs less. A distance d from the mean costs what
    chance makes of it, d times the error of the shares that report, and what of an excess may lie beyond, s^2 / (4 d)
    at most. `reported` are the reported values' moments, `pair` and `reports` the observations of the metric and of
    whether it is reported.
    """
    if reported.n < 2 or not reported.squares > 0:
        return furthest
    deviation, distance_to_end = math.sqrt(reported.squares / reported.n), abs(furthest - reported.mean)
    share = min(summary.mean for summary in reports)
    error, moved = (
        math.sqrt(sum(summary.variance / summary.n for summary in two if summary.n)) for two in (pair, reports)
    )

    def cost(distance: float) -> float:
        return PROOF_ERRORS * math.hypot(share * error, distance * moved)

    steps = (deviation * 1.25**k for k in range(CANDIDATE_ENDS))
    costs = [(cost(d) + share * deviation**2 / (4 * d), d) for d in steps if d < distance_to_end]
    _, distance = min([*costs, (cost(distance_to_end), distance_to_end)])
    return (
        furthest if distance == distance_to_end else reported.mean + math.copysign(distance, furthest - reported.mean)
    )
