"""Sets up a run of a game for a property, and compares its numbers with the truth.

Means over a batch that holds every path once are expectations, so tolerances are for float32 and for second-order terms.
"""

from functools import lru_cache
from typing import Any

from torch import Tensor

from marl_ray.config import spec_of
from marl_ray.conformance.algorithm import truth
from marl_ray.conformance.algorithm.game_run import (
    STILL_LEARNING_RATE,
    UNLIMITED,
    GameRun,
    GridPoint,
    needs_whole_episodes,
)
from marl_ray.conformance.algorithm.games import STATE_COUNT
from marl_ray.trajectories import Trajectories

Difference = str | None
"""A sentence about what differs; None if nothing does."""

FIRST_STEP_SETTINGS = {
    "lr": STILL_LEARNING_RATE,
    "epochs": 1,
    "minibatches": 1,
    "entropy_coef": 0.0,
    "max_grad_norm": UNLIMITED,
    "gamma": 1.0,
    "gae_lambda": 0.7,
    "cost_gamma": 1.0,
    "cost_gae_lambda": 0.4,
    "dynamic_sampling": 0,
    "trust_region": 1e-14,
}
"""Settings of one gradient step that moves nothing, on undiscounted sums."""
CRITIC_FIT_SETTINGS = {"critic_lr": 0.2, "critic_epochs": 30}
"""Settings that fit a critic which is fitted before the actor."""
CERTAIN_CRITIC_SETTINGS = {"critic_lr": 5.0, "critic_epochs": 10}
"""Settings that make such a critic certain that nothing is earned."""
DRIFT_SETTINGS = {"lr": 1e-2, "epochs": 2, "entropy_coef": 0.0, "dynamic_sampling": 0}
"""Settings of large steps, which show whether anything moves a policy that earns nothing."""
MOVING_MULTIPLIER_SETTINGS = {"lr": 3e-3, "multiplier_init": 0.5, "multiplier_lr": 0.1}
"""Settings of steps that move the policies and the multipliers measurably."""
BUDGETS = (0.9, 1.1)
"""Budgets by cost signal, which uniform policies exceed: their costs are about 1.8 and 2.2."""
EXACT_COSINE = 0.9999
"""Minimum cosine of two gradients that are equal but for the rounding of float32."""
SUMS_AFTER_TRUNCATION = {state: (0.2 * (state % 2), 0.5 + state % 2, 1.0) for state in range(STATE_COUNT)}
"""State -> reward and costs that would follow a truncation there."""


def begin_run(algorithm: str, case: GridPoint, rewarded: bool = True, priced: bool = True, **options: Any) -> GameRun:
    """Return a run of a game in which a truncated episode continues, if the algorithm counts what follows."""
    after = truth.zero_sums()
    if not (case.is_terminated or needs_whole_episodes(algorithm)):
        after = {
            state: (reward * rewarded, *(c * priced for c in costs))
            for state, (reward, *costs) in SUMS_AFTER_TRUNCATION.items()
        }
    priced = priced and spec_of(algorithm).needs_costs
    game = {"rewarded": rewarded, "priced": priced, **options.pop("game", {})}
    return GameRun(algorithm, case, after=after, game=game, **options)


def max_steps(game_run: GameRun) -> int:
    """Return the steps of the game that a batch of whole episodes has."""
    return 1 if game_run.has_whole_episodes and game_run.case.below else 2


def describe_difference(what: str, measured: float, true: float, tolerance: float) -> Difference:
    """Return a difference beyond a share of the truth, in words; None if there is none."""
    if abs(measured - true) <= tolerance * abs(true):
        return None
    times = f", {measured / true:.2f} times" if true else ""
    return f"{what} is {measured:.6g}, the true one {true:.6g}{times}"


def describe_angle(what: str, measured: Tensor, true: Tensor, min_cosine: float = EXACT_COSINE) -> Difference:
    """Return the reason why two gradients do not point the same way; None if they do."""
    if not measured.norm():
        return f"{what} is zero, the true one is not"
    cosine = float(measured @ true / (measured.norm() * true.norm()))
    return None if cosine >= min_cosine else f"{what} has cosine {cosine:.4f} with the true one"


@lru_cache(maxsize=16)
def first_update(algorithm: str, case: GridPoint) -> tuple[GameRun, dict[str, Trajectories]]:
    """Return a run of a game after its first gradient step, which moved nothing, and the batch of that step."""
    hyper = FIRST_STEP_SETTINGS | (CRITIC_FIT_SETTINGS if spec_of(algorithm).critic_first else {})
    game_run = begin_run(algorithm, case, hyper=hyper, mixed=True)
    batches = game_run.collect()
    game_run.update(batches)
    return game_run, batches
