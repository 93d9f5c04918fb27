"""Sequential tests of harm (to roll back) and of no harm (to promote), valid after every outcome.

Gain is mean(treatment) - mean(control), its sign turned where smaller outcomes are better. The two questions have a
test each, with its own error:

    harm       proves gain < -margin.  Error: rolling back an arm whose gain is -margin or more, ever.
    promotion  proves gain > -margin.  Error: promoting an arm whose gain is -margin or less, ever.

Both are the one-sided normal mixture (Howard, Ramdas, McAuliffe, Sekhon, arXiv 1810.08240, proposition 6): for a sum S
of intrinsic time V that has no upward drift,

    E = 2 sqrt(rho / (V + rho)) exp(S^2 / (2 (V + rho))) Phi(S / sqrt(V + rho))

exceeds 1 / alpha at any time with probability alpha at most. The variance is estimated, which makes the guarantee
asymptotic (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, arXiv 2103.06476). The following makes it hold from the first look
on, as `benchmarks/experiments/error_rates.py` measures for rare, heavy-tailed, skewed and autocorrelated outcomes:

- Nothing is decided before both arms have `min_outcomes`.
- An arm's variance is mixed with the larger of both arms', weighing `BORROWED_WEIGHT` outcomes. With rare or skewed outcomes
  a small mean comes with a small sample variance, and the arm would look surer of its luck than it can be. The mixture
  costs nothing if the arms vary alike.
- Promotion, which can wait, takes variances larger by `PROMOTION_CAUTION` / n: at the margin the treatment may vary more
  than either arm has shown yet.
- Outcomes that are 0 or 1 should be declared (`binary`): their variance follows from the mean, and the test takes the larger
  of the variances at the arm's mean and at the mean of the null hypothesis (as a score test does). So no luck makes it
  small, events may be rare, and an arm without any failure can be promoted. For outcomes with bounds `bets` is exact,
  and mostly slower.
- V is information: the inverse squared standard error of the gain, not the number of outcomes. The gain times it is a
  Brownian motion even while the shares of traffic change (a ramp), when the number of outcomes is no such clock.
- Units are assigned at random, one by one: drift that both arms share, and outcomes like those before them, do not
  correlate with the arm. Where units of one arm depend on each other (a policy with memory between sessions), a variance
  does not show it: assign clusters of units or blocks instead (`unit_clusters`).
"""

import math
from typing import NamedTuple

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics.intervals import TIGHTEST_AT, Interval, Summary, tune_rho

BORROWED_WEIGHT = 300
"""Weight, in outcomes, with which the larger variance enters each arm's; calibrated, as is `PROMOTION_CAUTION`."""
PROMOTION_CAUTION = 50
"""Promotion adds this over n times the larger variance."""


class OneSided(NamedTuple):
    """Result of a one-sided test at one look."""

    gain: float
    """The estimate, in units of the outcome; positive is better. NaN while an arm has no outcome."""
    bound: float
    """Harm: gain is below it; promotion: gain is above it. Holds at all looks at once; infinite at first."""
    e_value: float
    """Evidence against the null: its chance of ever reaching 1 / alpha is alpha at most if the null is true."""
    proven: bool

    @property
    def p_value(self) -> float:
        """Valid at all times: the chance that it ever falls to p is p at most if the null is true."""
        return min(1.0, 1 / self.e_value)


def judge_harm(
    treatment: Summary,
    control: Summary,
    *,
    alpha: float,
    margin: float,
    min_outcomes: int,
    higher_is_better: bool = True,
    binary: bool = False,
    scale: float = 1.0,
) -> OneSided:
    """Test whether the treatment is worse than the control by more than `margin` (in units of the outcome, >= 0).

    `binary` says that outcomes are 0 or 1 and independent; then the summaries' variances are not read. `scale` is the factor
    by which the control's outcomes have been multiplied (`relative_scale`), which `binary` must know.
    """
    _check_margin(margin)
    binaries = (scale, 1.0) if binary else None
    result = _test(control, treatment, alpha, -margin, min_outcomes, higher_is_better, binaries, 0)
    return OneSided(-result.gain, -result.bound, result.e_value, result.proven)


def judge_promotion(
    treatment: Summary,
    control: Summary,
    *,
    alpha: float,
    margin: float,
    min_outcomes: int,
    higher_is_better: bool = True,
    binary: bool = False,
    scale: float = 1.0,
) -> OneSided:
    """Test whether the treatment is better than the control, or worse by less than `margin`.

    `margin` (>= 0) is in units of the outcome; `binary` and `scale` mean the same as in `judge_harm`.
    """
    _check_margin(margin)
    binaries = (1.0, scale) if binary else None
    return _test(treatment, control, alpha, margin, min_outcomes, higher_is_better, binaries, PROMOTION_CAUTION)


def relative_scale(relative: float, higher_is_better: bool) -> float:
    """Return the factor for the control's outcomes that turns a relative margin into margin 0.

    "treatment - (1 - 0.02) control > 0" is a linear contrast with a variance of its own, whereas 2 % of the control's
    estimate would be one more number that chance moves. The factor is 1.02 where smaller is better. Only for metrics
    with a mean above 0.
    """
    return 1 - relative if higher_is_better else 1 + relative


def scale_summary(arm: Summary, scale: float) -> Summary:
    """Return the summary of the outcomes times `scale`."""
    return Summary(arm.n, scale * arm.mean, scale**2 * arm.variance)


def _check_margin(margin: float) -> None:
    if not 0 <= margin < math.inf:
        raise MarlRayError(f"margin: expected a finite number >= 0, got {margin}")


def _test(
    left: Summary,
    right: Summary,
    alpha: float,
    margin: float,
    first: int,
    higher_is_better: bool,
    binaries: tuple[float, float] | None,
    caution: float,
) -> OneSided:
    """Test whether left's advantage over right is above -margin.

    The result's fields are about that advantage. `binaries` is the value of each arm's non-zero outcomes; None if outcomes
    may be any number.
    """
    if not 0 < alpha < 0.5:
        raise MarlRayError(f"alpha: expected a number between 0 and 0.5, got {alpha}")
    if not left.n or not right.n:
        return OneSided(math.nan, -math.inf, 1.0, False)
    sign = 1 if higher_is_better else -1
    gain = sign * (left.mean - right.mean)
    if min(left.n, right.n) < max(first, 2):
        return OneSided(gain, -math.inf, 1.0, False)
    if binaries is None:
        error, v = standard_error_and_time(left, right, caution)
    else:
        error, v = _binary_information(left, right, sign * margin, binaries)
    if not 0 < error < math.inf:
        return OneSided(gain, -math.inf, 1.0, False)
    rho = tune_rho(2 * TIGHTEST_AT * first, 2 * alpha)
    bound = gain - error * one_sided_boundary(v, rho, alpha) / math.sqrt(v)
    evidence = log_e_value((gain + margin) / error * math.sqrt(v), v, rho)
    return OneSided(gain, bound, math.exp(min(evidence, 700.0)), bound > -margin)


def mean_interval(arm: Summary, max_variance: float, *, alpha: float, min_outcomes: int) -> Interval:
    """Return the bounds of an arm's mean that hold at all looks at once.

    `max_variance` is the largest variance of the experiment's arms. The bounds are infinite before the arm has
    `min_outcomes`, or while all outcomes are equal. The variance is taken as in `judge_promotion`, and the two sides
    have half of alpha each.
    """
    if not arm.n:
        return Interval(math.nan, -math.inf, math.inf)
    borrowed = (arm.n * arm.variance + BORROWED_WEIGHT * max_variance) / (
        arm.n + BORROWED_WEIGHT
    ) + PROMOTION_CAUTION * max_variance / arm.n
    if arm.n < max(min_outcomes, 2) or not 0 < borrowed < math.inf:
        return Interval(arm.mean, -math.inf, math.inf)
    rho = tune_rho(TIGHTEST_AT * min_outcomes, alpha)
    half = math.sqrt(borrowed) / arm.n * one_sided_boundary(arm.n, rho, alpha / 2)
    return Interval(arm.mean, arm.mean - half, arm.mean + half)


def standard_error_and_time(left: Summary, right: Summary, caution: float = 0.0) -> tuple[float, float]:
    """Return the standard error of the difference of means, and intrinsic time V.

    V = 2 (s1^2 + s2^2) / error^2: the number of all outcomes where the arms get equal traffic, and proportional to
    1 / error^2 where they do not. The error is NaN or 0 while the variance is unknown.
    """
    larger = max(left.variance, right.variance)
    s1, s2 = (
        (arm.n * arm.variance + BORROWED_WEIGHT * larger) / (arm.n + BORROWED_WEIGHT) + caution * larger / arm.n
        for arm in (left, right)
    )
    squared = s1 / left.n + s2 / right.n
    return math.sqrt(squared), 2 * (s1 + s2) / squared if squared > 0 else 0.0


def _binary_information(
    left: Summary, right: Summary, margin: float, events: tuple[float, float]
) -> tuple[float, float]:
    """Return `standard_error_and_time` for outcomes that are 0 or the arm's number in `events`.

    The hypothesis is that left's mean is right's less `margin`.
    """
    for arm, event in zip((left, right), events, strict=True):
        if not 0 <= arm.mean <= event:
            raise MarlRayError(f"binary: expected outcomes 0 or {event:g}, got a mean of {arm.mean}")
    pooled = (right.n * right.mean + left.n * (left.mean + margin)) / (left.n + right.n)
    s1 = max(_event_variance(pooled - margin, events[0]), _event_variance(left.mean, events[0]))
    s2 = max(_event_variance(pooled, events[1]), _event_variance(right.mean, events[1]))
    squared = s1 / left.n + s2 / right.n
    return math.sqrt(squared), 2 * (s1 + s2) / squared if squared > 0 else 0.0


def _event_variance(mean: float, event: float) -> float:
    mean = min(max(mean, 0.0), event)
    return mean * (event - mean)


def log_e_value(s: float, v: float, rho: float) -> float:
    """Return ln E of a sum s at intrinsic time v.

    E is the supermartingale exp(l s - l^2 v / 2), mixed over half-normal l.
    """
    return math.log(2) + 0.5 * math.log(rho / (v + rho)) + _evidence(s / math.sqrt(v + rho))


def one_sided_boundary(v: float, rho: float, alpha: float) -> float:
    """Return the sum at which E reaches 1 / alpha at intrinsic time v, by Newton steps.

    `alpha` must be below 0.5.
    """
    target = 0.5 * math.log((v + rho) / rho) - math.log(2 * alpha)
    x = math.sqrt(2 * target)
    for _ in range(50):
        # The function is convex and rising, so the steps come down on its root.
        density = math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        step = (_evidence(x) - target) / (x + density / _normal_cdf(x))
        x -= step
        if abs(step) < 1e-13 * x:
            break
    return x * math.sqrt(v + rho)


def _evidence(x: float) -> float:
    """Return x^2 / 2 + ln Phi(x)."""
    if x < -25:
        return -math.log(-x * math.sqrt(2 * math.pi))  # the first term of Phi's expansion, right to 0.2 %
    return x**2 / 2 + math.log(_normal_cdf(x))


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
