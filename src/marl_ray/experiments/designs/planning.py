"""Numbers of units that an experiment needs, for one look at the end and for tests at every look.

The deciding test (promotion; harm is found a little sooner) is simulated in its limit for many units: the gain's sum S
of intrinsic time V is a Brownian motion with drift. The normal mixture's evidence is a function of (S, V), and so is,
nearly, the betting test's: the mean over its stakes l of exp(l S - l^2 V / 2).
"""

import math
from typing import NamedTuple

import numpy as np

from marl_ray.errors import FieldError
from marl_ray.experiments.designs.fixed_size import samples_needed
from marl_ray.experiments.statistics.bets import EFFECTS, MAX_STAKE
from marl_ray.experiments.statistics.intervals import TIGHTEST_AT, tune_rho
from marl_ray.experiments.statistics.sequential import PROMOTION_CAUTION

SIMULATED_PATHS, LOOK_GROWTH = 2_000, 1.02
"""Number of simulated experiments, and the ratio of each look's number of units to that of the look before."""
MIN_EFFECT = 1e-6
"""Smallest alpha, and smallest effect in standard deviations, that can be planned for."""
MAX_UNITS = 1e9
"""No experiment of more units than this is planned."""


class SampleSizes(NamedTuple):
    """Planned numbers of units, treatment and control together."""

    fixed: int
    """One look at the end needs this many (Welch's test, two-sided)."""
    median: int | None
    """By this many, half of the experiments have proven the effect; None if not within a billion."""
    sure: int | None
    """By this many, the part `power` of the experiments has proven the effect; None if not within a billion."""


def sample_sizes(
    *,
    effect: float,
    sd: float,
    alpha: float = 0.05,
    power: float = 0.8,
    share: float = 0.5,
    min_outcomes: int = 50,
    bounds: tuple[float, float] | None = None,
) -> SampleSizes:
    """Return the units needed to prove a gain that lies `effect` (in units of the outcome) beyond the margin.

    `sd` is the outcomes' standard deviation, `share` the treatment's part of the units of both arms. With `bounds`
    (low, high) of the outcome the betting test decides, else the sequential test. Raises FieldError for values that
    no plan fits.
    """
    if not 0 < share < 1:
        raise FieldError("share", f"expected a number above 0 and below 1, got {share:g}")
    if not MIN_EFFECT <= alpha < 0.5:
        raise FieldError("alpha", f"expected a number from {MIN_EFFECT:g} to below 0.5, got {alpha:g}")
    if not 0 < sd < math.inf:
        raise FieldError("sd", f"expected a finite number above 0, got {sd:g}")
    if not MIN_EFFECT <= abs(effect) / sd < math.inf:
        raise FieldError(
            "effect", f"expected a finite number of {MIN_EFFECT:g} sd at least, got {effect:g} with sd {sd:g}"
        )
    if min_outcomes / min(share, 1 - share) >= MAX_UNITS:
        raise FieldError(
            "share", f"expected one that gives each arm {min_outcomes} of {MAX_UNITS:g} units, got {share:g}"
        )
    if bounds is not None and not (bounds[0] < bounds[1] < math.inf and sd <= (bounds[1] - bounds[0]) / 2 < math.inf):
        raise FieldError("bounds", f"expected low < high at least two sd apart, got {bounds} with sd {sd:g}")
    ratio = share / (1 - share)
    # Two units an arm show an effect of ten deviations; the noncentral t overflows for much larger ones.
    fixed = sum(samples_needed(effect=min(abs(effect), 10 * sd), sd=sd, alpha=alpha, power=power, ratio=ratio))
    units = np.exp(
        np.arange(math.log(min_outcomes / min(share, 1 - share)), math.log(MAX_UNITS), math.log(LOOK_GROWTH))
    )
    proven = _proven_by_look(units, abs(effect) / sd, share, alpha, min_outcomes, sd, bounds)

    def at(quantile: float) -> int | None:
        reached = proven >= quantile
        return math.ceil(units[reached.argmax()]) if reached.any() else None

    return SampleSizes(fixed, at(0.5), at(power))


def _proven_by_look(
    units: np.ndarray,
    delta: float,
    share: float,
    alpha: float,
    first: int,
    sd: float,
    bounds: tuple[float, float] | None,
) -> np.ndarray:
    """Return (looks,) part of the simulated experiments that have proven the effect by each look."""
    from scipy.special import log_ndtr, logsumexp

    # Per unit the gain's estimate earns information share (1 - share), outcomes being in standard deviations.
    time = units * share * (1 - share)
    rng = np.random.default_rng(0)
    path = np.zeros(SIMULATED_PATHS)
    proven, parts, before = np.zeros(SIMULATED_PATHS, bool), [], 0.0
    stakes = EFFECTS
    if bounds is not None:
        # The most careful stakes that bounds may call for: those of a mean near a bound.
        width, worst = (bounds[1] - bounds[0]) / sd, 1 / min(share, 1 - share)
        stakes = np.minimum(EFFECTS, MAX_STAKE / worst / width / (share * (1 - share)))
    rho = tune_rho(2 * TIGHTEST_AT * first, 2 * alpha)
    for n, now in zip(units, time, strict=True):
        path += delta * (now - before) + math.sqrt(now - before) * rng.standard_normal(SIMULATED_PATHS)
        before = now
        if bounds is None:
            v, arms = 4 * now, (n * share, n * (1 - share))
            # Variances are those that promotion takes.
            careful = sum(1 / arm + PROMOTION_CAUTION / arm**2 for arm in arms) * now
            x = path / math.sqrt(now * careful) * math.sqrt(v / (v + rho))
            evidence = math.log(2) + 0.5 * math.log(rho / (v + rho)) + x**2 / 2 + log_ndtr(x)
        else:
            evidence = logsumexp(stakes * path[:, None] - stakes**2 * now / 2, axis=1) - math.log(len(stakes))
        proven |= evidence >= -math.log(alpha)
        parts.append(proven.mean())
        if parts[-1] == 1:
            break
    parts += [parts[-1]] * (len(units) - len(parts))
    return np.array(parts)
