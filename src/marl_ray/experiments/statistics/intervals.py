"""Parts that all statistics of outcomes share: summaries, intervals, verdicts, and normal mixtures.

The normal-mixture confidence sequence (Howard, Ramdas, McAuliffe, Sekhon, arXiv 1810.08240, proposition 5) bounds a
sum S with intrinsic time V by

    P(exists t: |S_t| >= sqrt((V + rho) ln((V + rho) / (rho alpha^2)))) <= alpha.

`rho` decides at which V the bound is tightest; it never changes validity.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

TIGHTEST_AT = 10
"""Intervals are tightest at this multiple of `min_outcomes`: most decisions come well after the earliest possible."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of the outcomes of one arm."""

    n: int
    """Number of outcomes."""
    mean: float
    """NaN without outcomes."""
    variance: float
    """Sample variance, with n - 1 in the denominator; 0 below two outcomes."""


NO_OUTCOME = Summary(0, math.nan, 0.0)
"""The summary of an arm without outcomes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds around it; infinite bounds say that nothing is known yet."""

    estimate: float
    low: float
    high: float


class Verdict(StrEnum):
    """The claim that an interval around treatment minus control proves (larger outcomes are better)."""

    BETTER = "better"
    """The whole interval is above zero."""
    NON_INFERIOR = "non_inferior"
    """The whole interval is above -margin: if the treatment is worse, then by less than the accepted margin."""
    WORSE = "worse"
    """The whole interval is below zero."""
    UNDECIDED = "undecided"
    """The interval proves none of the others."""


def tune_rho(n: float, alpha: float) -> float:
    """Return the rho whose interval is tightest at time n.

    Source: arXiv 1810.08240, proposition 3, through the lower Lambert W branch.
    """
    return n / (-_lambert_w_lower(-(alpha**2) / math.e) - 1)


def _lambert_w_lower(x: float) -> float:
    """Return the solution w <= -1 of w exp(w) = x for x in (-1/e, 0), by Newton steps on ln(w/x) + w = 0."""
    # scipy has it too, but importing scipy.special takes longer than all of this package.
    w = math.log(-x) - math.log(-math.log(-x)) if x > -0.25 else -1 - math.sqrt(2 * (1 + math.e * x))
    for _ in range(50):
        step = (math.log(w / x) + w) / (1 / w + 1)
        w -= step
        if abs(step) < 1e-14 * abs(w):
            break
    return w


def verdict(interval: Interval, margin: float) -> Verdict:
    """Return the strongest verdict that the interval proves.

    All verdicts over all looks are right together with the interval's probability, since each only repeats what the
    interval says. A treatment proven worse by less than the margin counts as non-inferior: the margin says that such
    a loss is accepted.
    """
    if interval.low > 0:
        return Verdict.BETTER
    if interval.low > -margin:
        return Verdict.NON_INFERIOR
    if interval.high < 0:
        return Verdict.WORSE
    return Verdict.UNDECIDED
