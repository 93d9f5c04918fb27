"""Anytime-valid statistics of outcomes: intervals that hold at all times at once, however often one looks.

The normal-mixture confidence sequence (Howard, Ramdas, McAuliffe, Sekhon, arXiv 1810.08240, proposition 5) bounds a
sum S with intrinsic time V by

    P(exists t: |S_t| >= sqrt((V + rho) ln((V + rho) / (rho alpha^2)))) <= alpha.

Outcomes have no known variance, so the asymptotic version is used (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas,
arXiv 2103.06476, theorem 2.2): outcomes in units of their sample deviation, hence V = n, and for an estimate that
averages n terms of variance s^2

    half-width = s / n * sqrt((n + rho) ln((n + rho) / (rho alpha^2))).

`rho` says at which n the interval is tightest; it never changes validity. What is assumed: outcomes of an arm are
independent, with a finite variance and the same distribution over time, and n is not tiny (verdicts wait for
`min_outcomes`).
"""

import math
from dataclasses import dataclass
from enum import StrEnum

TIGHTEST_AT = 10
"""Intervals are tightest at this multiple of `min_outcomes`: most decisions come well after the earliest possible."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcomes of one arm: how many, their mean and their sample variance (n - 1 below)."""

    n: int
    mean: float
    variance: float


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds around it; infinite bounds say that nothing is known yet."""

    estimate: float
    low: float
    high: float


class Verdict(StrEnum):
    """What an interval around treatment minus control proves (larger outcomes are better)."""

    BETTER = "better"
    """The whole interval is above zero."""
    NON_INFERIOR = "non_inferior"
    """The whole interval is above -margin: if the treatment is worse, then by less than the accepted margin."""
    WORSE = "worse"
    """The whole interval is below zero."""
    UNDECIDED = "undecided"
    """None of these, or an arm has fewer than `min_outcomes` outcomes."""


def tune_rho(n: float, alpha: float) -> float:
    """The rho whose interval is tightest at time n (1810.08240, proposition 3, through the lower Lambert W branch)."""
    return n / (-_lambert_w_lower(-(alpha**2) / math.e) - 1)


def _lambert_w_lower(x: float) -> float:
    """The solution w <= -1 of w exp(w) = x for x in (-1/e, 0), by Newton steps on ln(w/x) + w = 0."""
    # scipy has it too, but importing scipy.special takes longer than all of this package.
    w = math.log(-x) - math.log(-math.log(-x)) if x > -0.25 else -1 - math.sqrt(2 * (1 + math.e * x))
    for _ in range(50):
        step = (math.log(w / x) + w) / (1 / w + 1)
        w -= step
        if abs(step) < 1e-14 * abs(w):
            break
    return w


def mixture_boundary(v: float, rho: float, alpha: float) -> float:
    """The two-sided normal-mixture boundary of a sum at intrinsic time v."""
    return math.sqrt((v + rho) * math.log((v + rho) / (rho * alpha**2)))


def mean_interval(arm: Summary, alpha: float, rho: float) -> Interval:
    """Confidence sequence of one arm's mean. Infinite while the variance is unknown (n < 2 or all outcomes equal)."""
    return _interval(arm.mean if arm.n else math.nan, arm.n, arm.variance, alpha, rho)


def difference_interval(treatment: Summary, control: Summary, alpha: float, rho: float) -> Interval:
    """Confidence sequence of mean(treatment) - mean(control).

    The difference is an average over all N outcomes of both arms whose terms have variance N (s_t^2/n_t + s_c^2/n_c)
    (2103.06476, section 3, without covariates). An arm whose outcomes are all equal says nothing about its variance
    yet and borrows the other arm's, because rare events look like certainty at first.
    """
    if not treatment.n or not control.n:
        return Interval(math.nan, -math.inf, math.inf)
    var_t = treatment.variance or control.variance
    var_c = control.variance or treatment.variance
    n = treatment.n + control.n
    variance = n * (var_t / treatment.n + var_c / control.n)
    return _interval(treatment.mean - control.mean, n, variance, alpha, rho)


def _interval(estimate: float, n: int, variance: float, alpha: float, rho: float) -> Interval:
    if n < 2 or not variance > 0:
        return Interval(estimate, -math.inf, math.inf)
    half = math.sqrt(variance) / n * mixture_boundary(n, rho, alpha)
    return Interval(estimate, estimate - half, estimate + half)


def verdict(interval: Interval, margin: float, outcomes: int, min_outcomes: int) -> Verdict:
    """What the interval proves now; `outcomes` is the smaller arm's count.

    All verdicts over all looks are right together with the interval's probability, since each only repeats what the
    interval says. A treatment proven worse by less than the margin counts as non-inferior: the margin says that such
    a loss is accepted.
    """
    if outcomes < min_outcomes:
        return Verdict.UNDECIDED
    if interval.low > 0:
        return Verdict.BETTER
    if interval.low > -margin:
        return Verdict.NON_INFERIOR
    if interval.high < 0:
        return Verdict.WORSE
    return Verdict.UNDECIDED


@dataclass(frozen=True, slots=True)
class Comparison:
    """One treatment against the control."""

    difference: Interval
    verdict: Verdict


def compare(
    treatment: Summary, control: Summary, *, alpha: float, margin: float, min_outcomes: int, treatments: int = 1
) -> Comparison:
    """Difference and verdict. `treatments` arms against one control share `alpha` (Bonferroni), so that the chance of
    any wrong verdict in the whole experiment stays below it."""
    alpha = alpha / treatments
    rho = tune_rho(2 * TIGHTEST_AT * min_outcomes, alpha)
    difference = difference_interval(treatment, control, alpha, rho)
    return Comparison(difference, verdict(difference, margin, min(treatment.n, control.n), min_outcomes))


def arm_interval(arm: Summary, *, alpha: float, min_outcomes: int) -> Interval:
    """Confidence sequence of one arm's mean, tuned like `compare`."""
    return mean_interval(arm, alpha, tune_rho(TIGHTEST_AT * min_outcomes, alpha))


def fixed_interval(arm: Summary, alpha: float) -> Interval:
    """The textbook interval, mean +- z s / sqrt(n): valid for one look, at a count fixed beforehand."""
    if arm.n < 2:
        return Interval(arm.mean if arm.n else math.nan, -math.inf, math.inf)
    from statistics import NormalDist

    half = NormalDist().inv_cdf(1 - alpha / 2) * math.sqrt(arm.variance / arm.n)
    return Interval(arm.mean, arm.mean - half, arm.mean + half)
