"""Do the arms' units report equally often? Asked of units whose windows are over, at any time.

Where units without an outcome do not count (`missing: exclude`), means compare those who reported. An arm that loses its
clients before they report, or whose outcomes come too late, is compared by others than the control's: 41 happy sessions of
410 are no evidence. That the arms report equally often does not prove that the same kind of units do, but where they do
not, another kind does.

Each unit is 1 if it has reported and 0 if not (of a cluster or block, its units' mean). Both one-sided tests of
`sequential.harm` with margin 0 and half of alpha each ask whether one arm does so less often than the other, within
epochs, with the exact variance of shares where units are assigned by themselves. That is more powerful than
comparing the counts of reports with the shares of units (`srm.sample_ratio`) where nearly all units report: 950 reports of
1,000 units are no surprise beside 1,000 of 1,000 as shares of 1,950, and a great one as units.
"""

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
