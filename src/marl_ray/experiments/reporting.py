"""Do the arms' units report equally often, and what could be missing in one of them? For units whose windows are over.

Where units without an outcome do not count (`missing: exclude`), means compare those who reported. An arm that loses its
clients before they report, or whose outcomes come too late, is compared by others than the control's: 41 happy sessions of
410 are no evidence. That the arms report equally often does not prove that the same kind of units do, but where they do
not, another kind does. Two things follow.

**The alarm** (`unequal_reporting`). Each unit is 1 if it has reported and 0 if not (of a cluster or block, its units'
mean). Both one-sided tests of `sequential.harm` with margin 0 and half of alpha each ask whether one arm does so less often
than the other, within epochs, with the exact variance of shares where units are assigned by themselves. That is more
powerful than comparing the counts of reports with the shares of units (`srm.sample_ratio`) where nearly all units report:
950 reports of 1,000 units are no surprise beside 1,000 of 1,000 as shares of 1,950, and a great one as units.

**The allowance** (`allowance`). Missing outcomes move the mean as soon as they are missing, and the alarm needs its time:
alone it would let every tenth to second experiment err whose treatment is as good and later (`benchmarks/experiments.py`).
So harm and promotion must hold whichever units are missing. If shares r < R of both arms' units report, the excess
q = 1 - r / R of the one arm's reports has no counterpart in the other. Without the best (or worst) of it, that arm's mean
would be lower (higher) by

    b = sd * phi(Phi^-1(1 - q)) / (1 - q)

were the outcomes normal (Lee, Review of Economic Studies 76, 2009, trims the sample itself); where they have bounds [l, h],
whatever they are, by the smaller of

    b = q / (1 - q) max(h - mean, mean - l),   b = sd sqrt(q / (1 - q)).

Tests take the treatment's mean moved by b against their claim. Where all units report it is 0, and it goes to 0 where
both arms report equally often.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

from marl_ray.experiments.sequential import harm
from marl_ray.experiments.statistics import Summary

ALARM = 0.01
"""Level of the alarm. A false one holds an experiment until a person looks at it; a missed one lets missing outcomes decide,
so it is above that of the sample ratio."""


class Unequal(NamedTuple):
    """What the shares of units that report say."""

    p_value: float
    """Valid at all times."""
    alarm: bool


def unequal_reporting(
    treatment: Summary, control: Summary, *, min_outcomes: int, units: bool, alpha: float = ALARM
) -> Unequal:
    """Whether one arm reports less than the other. `units`: observations are 0 or 1, of units assigned by themselves;
    else of clusters or blocks."""
    tests = [
        harm(one, other, alpha=alpha / 2, margin=0.0, min_outcomes=min_outcomes, binary=units)
        for one, other in ((treatment, control), (control, treatment))
    ]
    return Unequal(min(1.0, 2 * min(test.p_value for test in tests)), any(test.proven for test in tests))


def allowance(
    treatment: Summary,
    control: Summary,
    treatment_reports: Summary,
    control_reports: Summary,
    bounds: tuple[float, float] | None = None,
) -> float:
    """How far the difference of means may be off because the arms report unequally, in units of the outcome. The first
    two are of the outcomes, the others of the reports."""
    shares = treatment_reports.mean, control_reports.mean
    if not (treatment.n and control.n and 0 < min(shares) < max(shares)):
        return 0.0
    q = 1 - min(shares) / max(shares)
    more = treatment if shares[0] > shares[1] else control
    if bounds is not None:
        furthest = max(bounds[1] - more.mean, more.mean - bounds[0])
        return min(q / (1 - q) * furthest, math.sqrt(more.variance * q / (1 - q)))
    normal = NormalDist()
    return math.sqrt(more.variance) * normal.pdf(normal.inv_cdf(1 - q)) / (1 - q)
