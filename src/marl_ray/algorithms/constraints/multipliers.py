"""Lagrange multipliers that follow a measured cost, and the advantage they lead to.

A multiplier sees the relative error e = (J_c - d) / d, with J_c the mean episode cost and d the budget, so that its
gains mean the same for every budget; a budget of 0 leaves the error in units of the cost. Several constraints have one
multiplier each. All state is in the dataclass, so `Lagrange(**vars(multiplier))` continues bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from marl_ray.config import HyperParameters
from marl_ray.errors import MarlRayError

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Constants of Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1)."""


def _in_budget_units(cost: float, budget: float) -> tuple[float, float]:
    """Return the cost and its error (cost - budget), both in units of the budget. Raises MarlRayError if not finite."""
    if not math.isfinite(cost):
        raise MarlRayError(f"multiplier: expected a finite mean episode cost, got {cost}")
    unit = budget if budget > 0 else 1.0
    return cost / unit, (cost - budget) / unit


@dataclass(frozen=True)
class Lagrange:
    """Gradient ascent on lambda * e, held within [0, maximum] (Ray, Achiam and Amodei 2019, PPO-Lagrangian), damped.

    Adam moves lambda by about `lr` per update whatever the size of the error; `sgd` moves it by lr * e. The cost's weight is
    lambda + damping * e, within the same bounds: the gradient of the Lagrangian with damping / 2 * e^2 added (Platt and Barr
    1988, "Constrained differential optimization", eq. 6), so that policy and multiplier settle where they would circle.
    """

    STATE_FIELDS: ClassVar = ("value", "error", "first_moment", "second_moment", "updates")
    """The fields that an update moves; the others are settings."""

    budget: float
    """Mean cost allowed per episode."""
    _: KW_ONLY
    value: float
    """lambda, before the damping."""
    lr: float
    maximum: float
    optimizer: Literal["adam", "sgd"]
    damping: float
    error: float = 0.0
    """e of the last update."""
    first_moment: float = 0.0
    """Adam's decayed mean of the gradient, as the next field of its square; both stay 0 with `sgd`."""
    second_moment: float = 0.0
    updates: int = 0
    """Number of updates so far."""

    @classmethod
    def from_hyper(cls, hyper: HyperParameters, budget: float, optimizer: Literal["adam", "sgd"]) -> "Lagrange":
        """Return a multiplier before the first batch.

        `budget` is the mean cost that an episode may have.
        """
        return cls(
            budget,
            value=hyper.multiplier_init,
            lr=hyper.multiplier_lr,
            maximum=hyper.multiplier_max,
            optimizer=optimizer,
            damping=hyper.multiplier_damping,
        )

    @property
    def multiplier(self) -> float:
        """Weight of the cost, >= 0."""
        return self._within_bounds(self.value + self.damping * self.error)

    def with_cost(self, cost: float) -> "Lagrange":
        """Return the multiplier after an iteration whose episodes cost `cost` on average.

        Raises MarlRayError if the cost is not finite.
        """
        error = _in_budget_units(cost, self.budget)[1]
        gradient = -error
        updates = self.updates + 1
        if self.optimizer == "sgd":
            return replace(
                self, value=self._within_bounds(self.value - self.lr * gradient), error=error, updates=updates
            )
        first = BETA1 * self.first_moment + (1 - BETA1) * gradient
        second = BETA2 * self.second_moment + (1 - BETA2) * gradient * gradient
        direction = first / (1 - BETA1**updates) / (math.sqrt(second / (1 - BETA2**updates)) + EPSILON)
        return replace(
            self,
            value=self._within_bounds(self.value - self.lr * direction),
            error=error,
            first_moment=first,
            second_moment=second,
            updates=updates,
        )

    def _within_bounds(self, value: float) -> float:
        return min(max(value, 0.0), self.maximum)


@dataclass(frozen=True)
class PID:
    """A multiplier that is a PID controller of the cost.

    It is algorithm 2 of Stooke, Achiam and Abbeel (2020, arXiv 2007.03964):

        I = max(0, I + ki e)      P = a_p P + (1 - a_p) e      J = a_d J + (1 - a_d) J_c / d
        D = max(0, J - J `delay` updates ago)                  lambda = max(0, kp P + I + kd D)

    As in the authors' code, P and J start at 0, and during the first `delay` updates D compares with that start.
    """

    STATE_FIELDS: ClassVar = ("integral", "error", "costs")
    """The fields that an update moves; the others are settings."""

    budget: float
    """Mean cost allowed per episode."""
    _: KW_ONLY
    kp: float
    ki: float
    kd: float
    delay: int
    error_decay: float
    """a_p."""
    cost_decay: float
    """a_d."""
    integral: float
    """I."""
    error: float = 0.0
    """P, smoothed."""
    costs: list[float] = field(default_factory=lambda: [0.0])
    """J after each of the last `delay` updates and now, oldest first."""

    @classmethod
    def from_hyper(cls, hyper: HyperParameters, budget: float) -> "PID":
        """Return a multiplier before the first batch, whose P and J are not smoothed.

        `budget` is the mean cost that an episode may have.
        """
        return cls(
            budget,
            kp=hyper.pid_kp,
            ki=hyper.pid_ki,
            kd=hyper.pid_kd,
            delay=hyper.pid_delay,
            error_decay=0.0,
            cost_decay=0.0,
            integral=hyper.multiplier_init,
        )

    @property
    def derivative(self) -> float:
        """D: how much the smoothed cost rose, 0 where it fell."""
        return max(0.0, self.costs[-1] - self.costs[0])

    @property
    def multiplier(self) -> float:
        """Weight of the cost, >= 0."""
        return max(0.0, self.kp * self.error + self.integral + self.kd * self.derivative)

    def with_cost(self, cost: float) -> "PID":
        """Return the multiplier after an iteration whose episodes cost `cost` on average.

        Raises MarlRayError if the cost is not finite.
        """
        relative, error = _in_budget_units(cost, self.budget)
        smoothed = self.cost_decay * self.costs[-1] + (1 - self.cost_decay) * relative
        return replace(
            self,
            integral=max(0.0, self.integral + self.ki * error),
            error=self.error_decay * self.error + (1 - self.error_decay) * error,
            costs=[*self.costs, smoothed][-(self.delay + 1) :],
        )


Multiplier = Lagrange | PID


def with_settings_of(current: Multiplier, initial: Multiplier) -> Multiplier:
    """Return a multiplier with the state of `current` and the settings of `initial`.

    Both are of one class.
    """
    return replace(initial, **{name: getattr(current, name) for name in current.STATE_FIELDS})


def combine_advantages(
    advantages: Tensor, cost_advantages: Tensor, multipliers: Sequence[float], rescale: bool
) -> Tensor:
    """Return (A - sum_k lambda_k C_k) / (1 + sum_k lambda_k), (B, T), from A (B, T) and C (B, T, K).

    The division keeps the size of the step as the multipliers grow (Stooke et al. 2020); MAPPO-Lagrangian
    (arXiv 2110.02793) leaves it out. A and C must be on comparable scales, C centred.
    Raises ValueError unless C has a last entry for each multiplier.
    """
    if cost_advantages.shape != (*advantages.shape, len(multipliers)):
        raise ValueError(f"cost_advantages: expected (B, T, {len(multipliers)}), got {tuple(cost_advantages.shape)}")
    weights = torch.tensor(list(multipliers), dtype=cost_advantages.dtype, device=cost_advantages.device)
    combined = advantages - (cost_advantages * weights).sum(-1)
    return combined / (1 + sum(multipliers)) if rescale else combined
