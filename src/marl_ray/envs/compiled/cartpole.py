"""A compiled batch of Gymnasium's `CartPole-v1` (Barto, Sutton and Anderson 1983, IEEE SMC-13).

A state is a row of float64: the cart's place and speed, the pole's angle and its speed, and the number of steps. Terms are
in the order in which Gymnasium computes them, so that results agree to the last bit.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
from gymnasium.utils import seeding

from marl_ray.config.run.sections import EnvConfig
from marl_ray.envs.arrays import ArrayBatch

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


COMPILED_ARGUMENTS = {"sutton_barto_reward", "max_episode_steps"}
"""Arguments that the compiled batch reads. With any other, the environment runs in the loop."""
# Constants of Gymnasium's CartPoleEnv, in the units of the SI: m/s^2, kg, kg, m, N, s and kg m.
GRAVITY = 9.8
POLE_MASS = 0.1
TOTAL_MASS = 0.1 + 1.0
HALF_LENGTH = 0.5
FORCE = 10.0
TIME_STEP = 0.02
POLE_MOMENT = POLE_MASS * HALF_LENGTH
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360
"""Distance of the cart from the middle, in m, and angle of the pole, in radians, beyond which an episode ends."""


class CartPoleRules(NamedTuple):
    """The arguments of an environment."""

    limit: int
    """Steps after which an episode is truncated."""
    balanced_reward: float
    """The reward of a step after which the pole stands."""
    fallen_reward: float
    """The reward of the last step, if the pole falls or the cart leaves the track."""


def compiled_batch(
    config: EnvConfig, env: "ParallelEnv", copies: int, groups: Sequence[Sequence[str]], signals: int
) -> ArrayBatch | None:
    """Return the compiled batch of a config, as `copies.COMPILED_BATCHES` asks; None if it has to run in the loop."""
    kwargs, limit = config.kwargs, config.kwargs.get("max_episode_steps")
    if (
        config.id != "gymnasium.CartPole-v1"
        or not kwargs.keys() <= COMPILED_ARGUMENTS
        or (limit is not None and limit <= 0)
    ):
        return None
    rewards = (0.0, -1.0) if kwargs.get("sutton_barto_reward") else (1.0, 1.0)
    rules = CartPoleRules(int(limit or 500), *rewards)
    return ArrayBatch(env, copies, groups, signals, _begin, step_copies, observe, parameters=(rules,))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def step_copies(
    states: np.ndarray,
    alive: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    costs: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    rules: CartPoleRules,
) -> None:
    """Push the carts whose episodes run; see `arrays.StepCopies`."""
    for c in range(len(states)):
        if not alive[c, 0]:
            continue
        state = states[c]
        place = state[0]
        speed = state[1]
        angle = state[2]
        turning = state[3]
        force = FORCE if actions[c, 0] == 1 else -FORCE
        cosine, sine = math.cos(angle), math.sin(angle)
        push = (force + POLE_MOMENT * (turning * turning) * sine) / TOTAL_MASS
        turn = (GRAVITY * sine - cosine * push) / (
            HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * (cosine * cosine) / TOTAL_MASS)
        )
        acceleration = push - POLE_MOMENT * turn * cosine / TOTAL_MASS
        state[0] = place + TIME_STEP * speed
        state[1] = speed + TIME_STEP * acceleration
        state[2] = angle + TIME_STEP * turning
        state[3] = turning + TIME_STEP * turn
        state[4] += 1
        fell = abs(state[0]) > MAX_POSITION or abs(state[2]) > MAX_ANGLE
        rewards[c, 0] = rules.fallen_reward if fell else rules.balanced_reward
        terminated[c, 0] = fell
        truncated[c, 0] = state[4] >= rules.limit


@numba.njit(cache=True, nogil=True)
def observe(states: np.ndarray, copies: np.ndarray, agents: np.ndarray, rows: np.ndarray, rules: CartPoleRules) -> None:
    """Write observations; see `arrays.ObserveRows`."""
    for c in copies:
        for k in range(4):
            rows[c, 0, k] = states[c, k]


def _begin(seed: int) -> np.ndarray:
    """Return the state that the environment's `reset(seed=seed)` draws."""
    draws, _ = seeding.np_random(seed)
    return np.append(draws.uniform(-0.05, 0.05, 4), 0.0)
