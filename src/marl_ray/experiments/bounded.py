"""Confidence sequences for outcomes in [0, 1] by betting: valid at every count, with no variance to estimate.

Waudby-Smith and Ramdas, arXiv 2010.09686, theorem 3 (hedged capital). A gambler bets on and against each candidate
mean m:

    K+_t(m) = prod_i (1 + lambda+_i (X_i - m)),   K-_t(m) = prod_i (1 - lambda-_i (X_i - m)).

If m is the mean, both are martingales that start at 1, so max(K+, K-) / 2 ever reaches 1 / alpha with probability alpha
at most; the means not yet refuted are the interval. Bets are the predictable plug-in

    lambda_i = sqrt(2 ln(2 / alpha) / (s_{i-1}^2 i ln(1 + i))),   lambda+ = min(lambda, c / m),
                                                                    lambda- = min(lambda, c / (1 - m)),

from the mean and variance of earlier outcomes only, each with one imaginary outcome at 1/2 of variance 1/4. Unlike the
normal mixture this is exact from the first outcome on, for rare events too. What is assumed: bounded outcomes whose
conditional mean does not change.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics import Interval

Side = Literal["both", "low", "high"]
CAP = 0.5
"""c above: the largest share of the capital that one bet may lose."""
CHUNK = 1024
"""Outcomes handled at a time: bounds memory at CHUNK x grid numbers."""


def plug_in_bets(
    values: np.ndarray, alpha: float, n: int = 0, total: float = 0.0, squares: float = 0.0
) -> tuple[np.ndarray, float, float]:
    """Bets for values (k,) after n earlier ones, and the new (total, squares).

    `total` is the sum of outcomes, `squares` the sum of (X_i - mean_i)^2 with mean_i as of outcome i.
    """
    at = np.arange(n + 1, n + len(values) + 1)
    totals = total + values.cumsum()
    means = (0.5 + totals) / (at + 1)
    all_squares = squares + ((values - means) ** 2).cumsum()
    variances = (0.25 + np.concatenate([[squares], all_squares[:-1]])) / at
    bets = np.sqrt(2 * math.log(1 / alpha) / (variances * at * np.log1p(at)))
    return bets, float(totals[-1]), float(all_squares[-1])


def log_capital(values: np.ndarray, bets: np.ndarray, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log capitals (k, grid) of betting above and below each candidate mean (grid,), after each of values (k,)."""
    gaps = values[:, None] - means
    with np.errstate(divide="ignore"):
        above = np.minimum(bets[:, None], CAP / means)
        below = np.minimum(bets[:, None], CAP / (1 - means))
    return np.log1p(above * gaps).cumsum(0), np.log1p(-below * gaps).cumsum(0)


@dataclass(slots=True)
class BettingSequence:
    """Confidence sequence of the mean of a stream of outcomes in [0, 1].

    `side` "low" gives a lower bound only, "high" an upper one, each with all of alpha. Bounds are interpolated between
    `grid` candidate means; they are off by less than 1e-4 with the default (tested). The state is arrays and numbers.
    """

    alpha: float
    side: Side = "both"
    grid: int = 500
    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    capital: np.ndarray = field(init=False)
    """(2, grid + 1): log capital of betting above and below each mean now ..."""
    best: np.ndarray = field(init=False)
    """... and the largest it has been: a mean once refuted stays refuted."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise MarlRayError(f"alpha: expected a number between 0 and 1, got {self.alpha}")
        if self.side not in ("both", "low", "high"):
            raise MarlRayError(f"side: expected both, low or high, got {self.side!r}")
        self.capital = np.zeros((2, self.grid + 1))
        self.best = np.zeros((2, self.grid + 1))

    @property
    def _alpha(self) -> float:
        """Alpha of each side."""
        return self.alpha / 2 if self.side == "both" else self.alpha

    def update(self, values: np.ndarray) -> None:
        """Further outcomes (k,), in order."""
        values = np.asarray(values, dtype=float)
        if not np.all((values >= 0) & (values <= 1)):
            raise MarlRayError("outcomes: expected numbers from 0 to 1")
        means = np.linspace(0, 1, self.grid + 1)
        for start in range(0, len(values), CHUNK):
            part = values[start : start + CHUNK]
            bets, self.total, self.squares = plug_in_bets(part, self._alpha, self.n, self.total, self.squares)
            self.n += len(part)
            for side, path in enumerate(log_capital(part, bets, means)):
                path += self.capital[side]
                self.capital[side] = path[-1]
                np.maximum(self.best[side], path.max(0), out=self.best[side])

    def interval(self) -> Interval:
        """The mean and its bounds now; [0, 1] before the first outcome."""
        means = np.linspace(0, 1, self.grid + 1)
        limit = -math.log(self._alpha)
        # Capital above a mean falls with the mean, capital below it rises: each crosses the limit once.
        low = _crossing(means, self.best[0], limit) if self.side != "high" else 0.0
        high = 1 - _crossing(means, self.best[1][::-1], limit) if self.side != "low" else 1.0
        return Interval(self.total / self.n if self.n else math.nan, low, high)


def _crossing(means: np.ndarray, falling: np.ndarray, limit: float) -> float:
    """Where a falling function on a grid crosses the limit; 0 if it starts below."""
    refuted = int((falling >= limit).sum())
    if not refuted:
        return 0.0
    if refuted == len(means):
        return 1.0
    left, right = falling[refuted - 1], falling[refuted]
    share = 0.0 if math.isinf(left) else (left - limit) / (left - right)
    return float(means[refuted - 1] + share * (means[refuted] - means[refuted - 1]))


def betting_interval(values: np.ndarray, alpha: float, side: Side = "both") -> Interval:
    """The confidence sequence after all of values (n,)."""
    sequence = BettingSequence(alpha, side)
    sequence.update(values)
    return sequence.interval()


def difference(treatment: Interval, control: Interval) -> Interval:
    """Bounds of mean(treatment) - mean(control); holds with the sum of both intervals' alphas."""
    return Interval(treatment.estimate - control.estimate, treatment.low - control.high, treatment.high - control.low)
