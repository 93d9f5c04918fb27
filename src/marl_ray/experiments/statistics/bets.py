"""An exact test of two arms whose outcomes have known bounds, as bets on the units.

Each unit is bet on by the coin that gave it its arm. Let a unit's outcome, moved to [0, 1], be y, and let it be in the
treatment with the chance q that the router drew it with, else in the control. Let m be a centre that only earlier units
determine. Then
    Z = (y - m) (1[treatment] / q - 1[control] / (1 - q))

has the unit's own effect as its mean over that coin, y(treatment) - y(control), whatever season it is and whatever the
weights are: Z is exact under drift, ramps and adaptive traffic, where a mean per arm is not. If the mean effect is d at
most, a gambler who starts with 1 and stakes lambda on each Z being larger has after n units

    K(d) = prod_i (1 + lambda_i (Z_i - d)),

a supermartingale for every lambda that only earlier units determine and that cannot lose everything. So K ever reaches
1 / alpha with probability alpha at most (Waudby-Smith, Ramdas, arXiv 2010.09686, section 4 and proposition 3). No
variance has to be right and no count large: a loss that has not been seen yet is insured by the bound that it cannot pass.

Stakes: the best one for an effect of delta standard deviations is lambda = delta q (1 - q) / s, with s the deviation of
the earlier outcomes. Delta is unknown, so the capital is spread evenly over `EFFECTS` (the mixture's mean), and no stake
risks more than `MAX_STAKE` of its capital. The result depends on the units and their order alone, not on when somebody
looks at it.

The test's null hypothesis is that the mean effect is d or less at every time. An arm that is worse on Mondays and
better on Tuesdays may be proven both.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from marl_ray.errors import MarlRayError

EFFECTS = 0.005 * 3.0 ** np.arange(6)
"""Effects, in standard deviations, that the parts of the capital bet on."""
MAX_STAKE = 0.75
"""The largest part of its capital that one stake may lose."""
PRIOR_WEIGHT = 0.1
"""Weight, in outcomes, of an imaginary start with mean 1/2 and variance 1/4."""
EFFECT_GRID = 1e-4 * 1.25 ** np.arange(42)
"""Effects, as parts of the range, at which evidence is kept; bounds are interpolated between them."""
CHUNK = 32
"""Number of units handled at a time: a float holds the product of their factors."""
End = Literal["low", "high"]
"""An end of the range of a metric's values."""


@dataclass(slots=True)
class OutcomeMoments:
    """Running mean and variance of earlier outcomes, which `centers` continues."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of (y_i - m_i)^2, where m_i is the centre in force when y_i came."""

    def centers(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the centers m (k,) and deviations s (k,) in force for the next outcomes y (k,).

        Each is determined by earlier outcomes only.
        """
        count = self.n + PRIOR_WEIGHT + np.arange(len(y))
        totals = self.total + y.cumsum()
        centers = (PRIOR_WEIGHT / 2 + np.concatenate([[self.total], totals[:-1]])) / count
        squares = self.squares + ((y - centers) ** 2).cumsum()
        deviations = np.sqrt((PRIOR_WEIGHT / 4 + np.concatenate([[self.squares], squares[:-1]])) / count)
        self.n, self.total, self.squares = self.n + len(y), float(totals[-1]), float(squares[-1])
        return centers, deviations


@dataclass(slots=True)
class Capital:
    """Capital from betting that the effect is above or below each of several nulls.

    `side` is 1 for above and -1 for below; `nulls` (D,) are in parts of the range.
    """

    side: int
    nulls: np.ndarray
    logs: np.ndarray = field(init=False)
    """(len(EFFECTS), D) logarithms of the capital."""

    def __post_init__(self) -> None:
        self.logs = np.zeros((len(EFFECTS), len(self.nulls)))

    def bet(
        self, y: np.ndarray, treated: np.ndarray, share: np.ndarray, centers: np.ndarray, deviations: np.ndarray
    ) -> None:
        """Bet on further units (k,), in order.

        `y` are outcomes in [0, 1], `treated` says whether each is in the treatment, and `share` is its chance of that;
        `centers` and `deviations` are those of `OutcomeMoments`.
        """
        control_share = 1 - share
        gains = self.side * (y - centers) * np.where(treated, 1 / share, -1 / control_share)
        low, high = (centers, 1 - centers) if self.side > 0 else (1 - centers, centers)
        worst = np.maximum(low / share, high / control_share)[:, None]
        nulls = self.side * self.nulls
        # The worst loss is worst + null. Half of worst bounds the stake where a null makes that small or negative.
        caps = MAX_STAKE / np.maximum(worst + nulls, worst / 2)
        stakes = (share * control_share / deviations)[:, None] * EFFECTS
        for at in range(0, len(y), CHUNK):
            part = slice(at, at + CHUNK)
            risked = np.minimum(stakes[part, :, None], caps[part, None, :])
            # At most CHUNK factors, none below 1 - MAX_STAKE: a float holds their product.
            self.logs += np.log((1 + risked * (gains[part, None, None] - nulls)).prod(0))

    def log_evidence(self) -> np.ndarray:
        """Return (D,) ln K against each null."""
        peak = self.logs.max(0)
        evidence: np.ndarray = peak + np.log(np.exp(self.logs - peak).mean(0))
        return evidence


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about a treatment and the control that a bet tries to prove.

    The treatment's gain over `scale` x control exceeds -`margin` (`side` 1, promotion), or falls below it (-1, harm).
    `low` and `high` are the outcome's bounds; `margin` is in its units. A `scale` other than 1 is for relative margins
    (`sequential.relative_scale`), whose `margin` is 0. `missing` counts units without an outcome as that end of the
    range in which both arms' numbers lie (see `missing_outcomes`); then the margin is added to the outcomes that the
    treatment's units report, and the gain over all units is tested against 0.
    """

    side: int
    low: float
    high: float
    margin: float
    higher_is_better: bool = True
    scale: float = 1.0
    missing: End | None = None

    @property
    def shift(self) -> float:
        """Number that is added to the treatment's outcomes."""
        if self.missing is None:
            return 0.0
        return self.margin if self.higher_is_better else -self.margin

    @property
    def range(self) -> tuple[float, float]:
        """(low, high) between which both arms' numbers lie."""
        return shifted_ends(self.low, self.high, self.shift, self.scale)

    @property
    def null(self) -> float:
        """The gain that the claim is tested against, as a part of the range."""
        lowest, highest = self.range
        return 0.0 if self.missing is not None else float(np.clip(-self.margin / (highest - lowest), -1, 1))


def shifted_ends(low: float, high: float, shift: float, scale: float) -> tuple[float, float]:
    """Return the lowest and the highest outcome of both arms together, shifted and scaled.

    Outcomes are from `low` to `high`; `shift` is added to the treatment's, and the control's are multiplied by `scale`.
    """
    return min(low + shift, scale * low), max(high + shift, scale * high)


@dataclass(slots=True)
class BettingTest:
    """The bets on one claim, continued from unit to unit."""

    claim: Claim
    memory: OutcomeMoments = field(default_factory=OutcomeMoments)
    capital: Capital = field(init=False)

    def __post_init__(self) -> None:
        low, high = self.claim.low, self.claim.high
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise MarlRayError(f"bounds: expected finite low < high, got [{low:g}, {high:g}]")
        nulls = np.concatenate([EFFECT_GRID, [0.0], -EFFECT_GRID, [self.claim.null]])
        self.capital = Capital(self.claim.side, np.unique(np.clip(nulls, -1, 1)))

    def add(self, values: np.ndarray, treated: np.ndarray, share: np.ndarray) -> None:
        """Bet on further units (k,), in order.

        `values` are outcomes, moved into the bounds where they are outside, and NaN for none if the claim says what a
        missing one counts as; `treated` says which units are in the treatment; `share` is each unit's chance of it,
        above 0 and below 1.
        """
        if not len(values):
            return
        claim, (lowest, highest) = self.claim, self.claim.range
        moved = np.clip(values.astype(float), claim.low, claim.high)
        y = (np.where(treated, moved + claim.shift, claim.scale * moved) - lowest) / (highest - lowest)
        if claim.missing is not None:
            y = np.where(np.isnan(y), 0.0 if claim.missing == "low" else 1.0, y)
        y = y if claim.higher_is_better else 1 - y
        self.capital.bet(y, treated, share, *self.memory.centers(y))

    def evidence(self) -> "BetEvidence":
        """Return the evidence after the units so far."""
        nulls, logs, (lowest, highest) = self.capital.nulls, self.capital.log_evidence(), self.claim.range
        log_e = float(logs[np.searchsorted(nulls, self.claim.null)])
        return BetEvidence(self.claim.side, self.memory.n, (highest - lowest) * nulls, logs, log_e)


@dataclass(frozen=True, slots=True)
class BetEvidence:
    """Evidence of a `BettingTest` at one moment."""

    side: int
    n: int
    """Number of units of both arms."""
    nulls: np.ndarray
    """(D,) gains in units of the outcome, ascending."""
    logs: np.ndarray
    """(D,) ln E against each of `nulls`: falling for `side` 1, rising for -1."""
    log_e: float
    """ln E against the claim's null hypothesis."""

    def bound(self, alpha: float) -> float:
        """Return the bound beyond which the gain is, at all times with probability 1 - alpha.

        The gain is above it (`side` 1) or below it (-1). The bound is infinite at first, and is interpolated between the
        nulls of the grid.
        """
        limit, logs, nulls = -math.log(alpha), self.logs, self.nulls
        if self.side < 0:
            logs, nulls = logs[::-1], -nulls[::-1]
        refuted = int((logs >= limit).sum())
        if not refuted:
            return -math.inf * self.side
        bound = nulls[refuted - 1]
        if refuted < len(nulls):
            # Evidence grows about as the square of the distance, so its root is interpolated.
            lower, at, upper = (math.copysign(math.sqrt(abs(x)), x) for x in (logs[refuted - 1], limit, logs[refuted]))
            bound += (lower - at) / (lower - upper) * (nulls[refuted] - bound)
        return float(self.side * bound)
