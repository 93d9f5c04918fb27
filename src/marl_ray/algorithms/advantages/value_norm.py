"""Running normalisation of critic targets (van Hasselt et al. 2016, arXiv 1602.07714), in the form that MAPPO uses."""

from dataclasses import dataclass, replace

from torch import Tensor

DECAY = 0.99999
"""Weight of the past moments at each batch; that of MAPPO's code (Yu et al. 2022, arXiv 2103.01955)."""
VARIANCE_FLOOR = 1e-2
"""Smallest variance by which targets are divided, in squared units of the return; MAPPO's. Without it the rounding of
returns that hardly vary would be what the critic learns."""


@dataclass(frozen=True)
class ValueNorm:
    """Debiased moving mean and variance of returns; the critic predicts (return - mean) / std.

    Each critic has one, because reward and cost returns have different scales.
    """

    mean_sum: float = 0.0
    """Decayed sum of the means of the batches."""
    square_sum: float = 0.0
    """Decayed sum of the mean squares of the batches."""
    weight: float = 0.0
    """Sum of the decayed weights, by which the moments are divided."""

    def add_batch(self, mean: float, square: float) -> "ValueNorm":
        """Add one batch, given the mean and the mean square of its returns over all workers."""
        return replace(
            self,
            mean_sum=DECAY * self.mean_sum + (1 - DECAY) * mean,
            square_sum=DECAY * self.square_sum + (1 - DECAY) * square,
            weight=DECAY * self.weight + (1 - DECAY),
        )

    @property
    def mean(self) -> float:
        """The mean of the returns so far, in units of the return; 0 before the first."""
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation of the returns so far, at least the root of VARIANCE_FLOOR.

        The deviation is 1 before the first return.
        """
        if not self.weight:
            return 1.0
        variance = self.square_sum / self.weight - self.mean**2
        return float(max(variance, VARIANCE_FLOOR) ** 0.5)

    def normalize(self, values: Tensor) -> Tensor:
        """Convert from reward units to the critic's units."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Convert from the critic's units to reward units."""
        return values * self.std + self.mean
