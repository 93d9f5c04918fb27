"""Compare rollout and update with what the machine can do: multiply matrices, and move numbers from and to memory."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from marl_ray.config import RunConfig
from marl_ray.envs.registry import make_env
from marl_ray.policies.actor_critic.spaces import CATEGORICAL_SPACES, cardinalities, row_dtype, row_size

ADAM_ROWS = 7
"""Rows of all weights that a step of Adam reads or writes: the gradient, and both of weights and two moments."""
SIZE = 1024
"""Rows of the matrices that are multiplied."""
LONG = 1 << 25
"""Numbers of the arrays that are copied, more than any cache holds."""


class Work(NamedTuple):
    """An amount of work; of a machine: what a core does in a second."""

    flop: float
    moved: float
    """Bytes from and to memory."""


def measure_peaks() -> Work:
    """Measure one core: products of matrices of float32, and a copy of a long array."""
    left = np.ones((SIZE, SIZE), np.float32)
    right, out, long = left.copy(), left.copy(), np.ones(LONG, np.float32)
    target = np.empty_like(long)
    with threadpool_limits(1):
        product = _fastest(lambda: np.dot(left, right, out))
    return Work(2 * SIZE**3 / product, 2 * long.nbytes / _fastest(lambda: np.copyto(target, long)))


def _fastest(action: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(7):
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def work_of(config: RunConfig) -> tuple[Work, Work]:
    """Return the rollout's and the update's work for one environment step of a run with local critics.

    Every decision counts in full, also where equal observations are evaluated once, which may give more than the whole
    roofline; the first layer over categories is additions. Weights stay in the cache, so that observations and Adam's
    rows alone move.
    """
    env = make_env(config.env)
    rollout_flop = update_flop = rows = adam = 0.0
    for agent in env.possible_agents:
        space, (name, policy) = env.observation_space(agent), next(iter(config.team.items()))
        widths, actions, hyper = policy.network.hidden, int(env.action_space(agent).n), config.hyper_of(name)
        hidden = sum(a * b for a, b in itertools.pairwise(widths))
        inputs = row_size(space)
        categorical = isinstance(space, CATEGORICAL_SPACES)
        first = inputs * widths[0] * (1 if categorical else 2)
        forward = 2 * first + 2 * (2 * hidden) + 2 * widths[-1] * (actions + 1)  # actor and critic
        rollout_flop += forward
        update_flop += 3 * forward * hyper.epochs
        rows += inputs * row_dtype(space).itemsize
        entries = sum(cardinalities(space)) if categorical else inputs
        weights = 2 * (entries * widths[0] + hidden) + widths[-1] * (actions + 1)
        adam = 4.0 * ADAM_ROWS * weights * hyper.epochs * hyper.minibatches / config.batch_steps
        epochs = hyper.epochs
    env.close()
    return Work(rollout_flop, 2 * rows), Work(update_flop, rows * epochs + adam)


def roofline_lines(
    config: RunConfig, peaks: Work, steps_per_second: float, shares: dict[str, float], workers: int
) -> list[str]:
    """Say how much of each part's time a machine at its peaks would take.

    `shares` are those of an iteration.
    """
    lines = []
    for part, work in zip(("rollout", "update"), work_of(config), strict=True):
        seconds = workers * shares[part] / steps_per_second
        by_flop, by_memory = work.flop / peaks.flop, work.moved / peaks.moved
        bound = "products" if by_flop > by_memory else "memory"
        lines.append(
            f"{part}: {work.flop / 1e3:,.0f} kflop and {work.moved / 1e3:,.1f} kB an environment step, "
            f"{seconds * 1e6:,.1f} us of a core; {max(by_flop, by_memory) / seconds:.1%} of the roofline (bound by {bound})"
        )
    return lines


def peaks_line(peaks: Work) -> str:
    """Say what a core can do."""
    assert all(math.isfinite(peak) for peak in peaks)
    return f"A core multiplies matrices at {peaks.flop / 1e9:,.0f} GFLOP/s and copies {peaks.moved / 1e9:,.1f} GB/s."
