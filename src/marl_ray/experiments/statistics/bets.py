"""An exact test of two arms whose outcomes have known bounds: a bet on every unit, by the coin that gave it its arm.

Let a unit's outcome, moved to [0, 1], be y, and let it be in the treatment with the chance q that the router drew it
with, else in the control. With a centre m that only earlier units say,

    Z = (y - m) (1[treatment] / q - 1[control] / (1 - q))

has the unit's own effect as its mean over that coin, y(treatment) - y(control), whatever season it is and whatever the
weights are: Z is exact under drift, ramps and adaptive traffic, where a mean per arm is not. If the mean effect is d at
most, a gambler who starts with 1 and stakes lambda on each Z being larger has after n units

    K(d) = prod_i (1 + lambda_i (Z_i - d)),

a supermartingale for every lambda that only earlier units say and that cannot lose everything. So K ever reaches
1 / alpha with probability alpha at most (Waudby-Smith, Ramdas, arXiv 2010.09686, section 4 and proposition 3). No
variance has to be right and no count large: a loss that has not been seen yet is insured by the bound that it cannot pass.

Stakes: the best one for an effect of delta standard deviations is lambda = delta q (1 - q) / s, with s the deviation of
the earlier outcomes. Delta is unknown, so the capital is spread evenly over `EFFECTS` (the mixture's mean), and no stake
risks more than `CAP` of its capital. The result depends on the units and their order alone, not on when it is looked at.

What is tested: that the mean effect is d or less at every time. An arm that is worse on Mondays and better on Tuesdays
may be found both.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from marl_ray.errors import MarlRayError

EFFECTS = 0.005 * 3.0 ** np.arange(6)
"""Standard deviations that the parts of the capital bet on."""
CAP = 0.75
"""The largest part of its capital that one stake may lose."""
PRIOR = 0.1
"""Outcomes' worth of an imaginary mean 1/2 and variance 1/4 before the first unit."""
GRID = 1e-4 * 1.25 ** np.arange(42)
"""Effects, as parts of the range, between which a bound is interpolated."""
CHUNK = 32
"""Units handled at a time."""
End = Literal["low", "high"]


@dataclass(slots=True)
class Memory:
    """What earlier outcomes say: `centres` continues it."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of (y_i - m_i)^2, m_i being the centre that y_i met."""

    def centres(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the next outcomes y (k,): m and s that each meets (k,), which only those before it say."""
        count = self.n + PRIOR + np.arange(len(y))
        totals = self.total + y.cumsum()
        centres = (PRIOR / 2 + np.concatenate([[self.total], totals[:-1]])) / count
        squares = self.squares + ((y - centres) ** 2).cumsum()
        deviations = np.sqrt((PRIOR / 4 + np.concatenate([[self.squares], squares[:-1]])) / count)
        self.n, self.total, self.squares = self.n + len(y), float(totals[-1]), float(squares[-1])
        return centres, deviations


@dataclass(slots=True)
class Capital:
    """Capital of betting that the effect is above (`side` 1) or below (-1) each of `nulls` (D,), in parts of the range."""

    side: int
    nulls: np.ndarray
    logs: np.ndarray = field(init=False)
    """(len(EFFECTS), D)."""

    def __post_init__(self) -> None:
        self.logs = np.zeros((len(EFFECTS), len(self.nulls)))

    def bet(
        self, y: np.ndarray, treated: np.ndarray, share: np.ndarray, centres: np.ndarray, deviations: np.ndarray
    ) -> None:
        """Further units (k,), in order: outcomes in [0, 1], whether in the treatment, their chance of it, and `Memory`'s."""
        rest = 1 - share
        gains = self.side * (y - centres) * np.where(treated, 1 / share, -1 / rest)
        low, high = (centres, 1 - centres) if self.side > 0 else (1 - centres, centres)
        worst = np.maximum(low / share, high / rest)[:, None]
        nulls = self.side * self.nulls
        # No more than the loss that the bounds allow, which a null beyond them all makes none.
        caps = CAP / np.maximum(worst + nulls, worst / 2)
        stakes = (share * rest / deviations)[:, None] * EFFECTS
        for at in range(0, len(y), CHUNK):
            part = slice(at, at + CHUNK)
            risked = np.minimum(stakes[part, :, None], caps[part, None, :])
            # At most CHUNK factors, none below 1 - CAP: a float holds their product.
            self.logs += np.log((1 + risked * (gains[part, None, None] - nulls)).prod(0))

    def log_evidence(self) -> np.ndarray:
        """(D,) ln K of each null."""
        most = self.logs.max(0)
        return most + np.log(np.exp(self.logs - most).mean(0))


@dataclass(frozen=True, slots=True)
class Claim:
    """A treatment's gain over `scale` x control exceeds -`margin` (`side` 1, promotion), or falls below it (-1, harm).

    `low` and `high` are the outcome's bounds; `margin` is in its units. A `scale` other than 1 is for relative margins
    (`sequential.relative_scale`), whose `margin` is 0. `missing` says that units without an outcome count as one end of the
    range that both arms' numbers lie in, see `reporting`; what the treatment's units report is then moved by the margin,
    and the gain per unit, of those that report and those that do not, held against 0.
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
        """What is added to the treatment's outcomes."""
        if self.missing is None:
            return 0.0
        return self.margin if self.higher_is_better else -self.margin

    @property
    def range(self) -> tuple[float, float]:
        """That both arms' numbers lie in."""
        return ends(self.low, self.high, self.shift, self.scale)

    @property
    def null(self) -> float:
        """The gain that it is held against, as a part of the range."""
        least, most = self.range
        return 0.0 if self.missing is not None else float(np.clip(-self.margin / (most - least), -1, 1))


def ends(low: float, high: float, shift: float, scale: float) -> tuple[float, float]:
    """The range of the treatment's outcomes moved by `shift` and the control's times `scale` together, for outcomes from
    `low` to `high`."""
    return min(low + shift, scale * low), max(high + shift, scale * high)


@dataclass(slots=True)
class BettingTest:
    """The bets on one claim, continued from unit to unit."""

    claim: Claim
    memory: Memory = field(default_factory=Memory)
    capital: Capital = field(init=False)

    def __post_init__(self) -> None:
        low, high = self.claim.low, self.claim.high
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise MarlRayError(f"bounds: expected finite low < high, got [{low:g}, {high:g}]")
        nulls = np.concatenate([GRID, [0.0], -GRID, [self.claim.null]])
        self.capital = Capital(self.claim.side, np.unique(np.clip(nulls, -1, 1)))

    def add(self, values: np.ndarray, treated: np.ndarray, share: np.ndarray) -> None:
        """Further units (k,) in order: outcomes (moved into the bounds where they are outside; NaN for none, where the
        claim says what is missing), whether in the treatment (else in the control), and their chance of the treatment
        among these two, above 0 and below 1."""
        if not len(values):
            return
        claim, (least, most) = self.claim, self.claim.range
        moved = np.clip(values.astype(float), claim.low, claim.high)
        y = (np.where(treated, moved + claim.shift, claim.scale * moved) - least) / (most - least)
        if claim.missing is not None:
            y = np.where(np.isnan(y), 0.0 if claim.missing == "low" else 1.0, y)
        y = y if claim.higher_is_better else 1 - y
        self.capital.bet(y, treated, share, *self.memory.centres(y))

    def evidence(self) -> "BetEvidence":
        """What the units so far prove."""
        nulls, found, (least, most) = self.capital.nulls, self.capital.log_evidence(), self.claim.range
        log_e = float(found[np.searchsorted(nulls, self.claim.null)])
        return BetEvidence(self.claim.side, self.memory.n, (most - least) * nulls, found, log_e)


@dataclass(frozen=True, slots=True)
class BetEvidence:
    """What a `BettingTest` proves at one moment."""

    side: int
    n: int
    """Units of both arms."""
    nulls: np.ndarray
    """(D,) gains in units of the outcome, ascending, and ..."""
    logs: np.ndarray
    """... ln E against each (D,): it falls along the nulls for `side` 1 and rises for -1."""
    log_e: float
    """ln E against "the gain is on the other side of what the claim holds it against, or there"."""

    def bound(self, alpha: float) -> float:
        """The gain is above it (`side` 1) or below it (-1), at all times with probability 1 - alpha; infinite at first.

        Interpolated between the nulls of the grid.
        """
        limit, logs, nulls = -math.log(alpha), self.logs, self.nulls
        if self.side < 0:
            logs, nulls = logs[::-1], -nulls[::-1]
        refuted = int((logs >= limit).sum())
        if not refuted:
            return -math.inf * self.side
        found = nulls[refuted - 1]
        if refuted < len(nulls):
            # About a square of the distance: its root is nearly straight.
            one, at, other = (math.copysign(math.sqrt(abs(x)), x) for x in (logs[refuted - 1], limit, logs[refuted]))
            found += (one - at) / (one - other) * (nulls[refuted] - found)
        return float(self.side * found)
