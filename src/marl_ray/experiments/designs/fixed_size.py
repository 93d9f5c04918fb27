"""The textbook experiment: a sample size fixed beforehand and one look, at the end.

Further looks break its error rate.
"""

import math
from typing import NamedTuple

from marl_ray.errors import FieldError
from marl_ray.experiments.statistics.intervals import Interval, Summary


class WelchTest(NamedTuple):
    """Welch's t-test of mean(treatment) - mean(control)."""

    difference: Interval
    """In units of the outcome."""
    percent: Interval
    """100 (mean(treatment) / mean(control) - 1), bounds by the delta method; infinite while the control may be 0."""
    p_value: float
    """Two-sided."""
    dof: float
    """Degrees of freedom; NaN where nothing is known."""


def welch(treatment: Summary, control: Summary, alpha: float) -> WelchTest:
    """Run the two-sided test at level alpha (Welch 1947, degrees of freedom by Satterthwaite).

    With fewer than two outcomes in an arm, or none that differ, nothing is known: infinite bounds, p = 1.
    """
    unknown = Interval(treatment.mean - control.mean, -math.inf, math.inf)
    parts = [arm.variance / arm.n if arm.n else math.nan for arm in (treatment, control)]
    squared = sum(parts)
    if min(treatment.n, control.n) < 2 or not squared > 0:
        return WelchTest(unknown, Interval(_percent(treatment.mean, control.mean), -math.inf, math.inf), 1.0, math.nan)
    from scipy.special import stdtr, stdtrit

    dof = squared**2 / sum(part**2 / (arm.n - 1) for part, arm in zip(parts, (treatment, control), strict=True))
    quantile = float(stdtrit(dof, 1 - alpha / 2))
    error, estimate = math.sqrt(squared), unknown.estimate
    p_value = float(2 * stdtr(dof, -abs(estimate) / error))
    difference = Interval(estimate, estimate - quantile * error, estimate + quantile * error)
    relative, low, high = _percent(treatment.mean, control.mean), -math.inf, math.inf
    # Fieller's interval has the same rule: a control that may be zero bounds no ratio.
    if abs(control.mean) > quantile * math.sqrt(parts[1]):
        ratio = treatment.mean / control.mean
        half = 100 * quantile * math.hypot(math.sqrt(parts[0]), ratio * math.sqrt(parts[1])) / abs(control.mean)
        low, high = relative - half, relative + half
    return WelchTest(difference, Interval(relative, low, high), p_value, dof)


def _percent(treatment: float, control: float) -> float:
    return 100 * (treatment / control - 1) if control else math.nan


def power_of_test(treatment: int, control: int, *, effect: float, sd: float, alpha: float) -> float:
    """Return the chance that the two-sided t-test finds a true difference `effect`.

    `treatment` and `control` are counts of outcomes; both arms have the standard deviation `sd`.
    """
    from scipy.special import nctdtr, stdtrit

    dof = treatment + control - 2
    shift = abs(effect) / (sd * math.sqrt(1 / treatment + 1 / control))
    limit = float(stdtrit(dof, 1 - alpha / 2))
    return float(1 - nctdtr(dof, shift, limit) + nctdtr(dof, shift, -limit))


def samples_needed(
    *, effect: float, sd: float, alpha: float = 0.05, power: float = 0.8, ratio: float = 1.0
) -> tuple[int, int]:
    """Return the fewest outcomes (treatment, control) with which the t-test reaches `power_of_test`.

    `ratio` is treatment over control; `effect` and `sd` are in units of the outcome. The normal formula gives a start, which
    the noncentral t counts up from. Raises FieldError naming the argument that is out of its range.
    """
    for name, value, is_valid, expected in (
        ("sd", sd, 0 < sd < math.inf, "a finite number above 0"),
        ("effect", effect, 0 < abs(effect) < math.inf, "a finite number other than 0"),
        ("ratio", ratio, 0 < ratio < math.inf, "a finite number above 0"),
        ("alpha", alpha, 0 < alpha < 1, "a number above 0 and below 1"),
        ("power", power, alpha < power < 1, f"a number above alpha, {alpha:g}, and below 1"),
    ):
        if not is_valid:
            raise FieldError(name, f"expected {expected}, got {value:g}")
    from scipy.special import ndtri

    z = float(ndtri(1 - alpha / 2) + ndtri(power))
    control = max(2, math.floor((z * sd / effect) ** 2 * (1 + 1 / ratio)) - 2)
    while True:
        treatment = max(2, math.ceil(ratio * control))
        if power_of_test(treatment, control, effect=effect, sd=sd, alpha=alpha) >= power:
            return treatment, control
        control += 1
