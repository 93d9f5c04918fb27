"""Random numbers that depend on their purpose (seed, iteration, episode, agent), and not on the worker that draws them."""

from collections.abc import Iterable

import numpy as np

_MASK = (1 << 64) - 1
COPIES_BITS, ATTEMPT_BITS = 20, 7
"""A stream's number has the bits iteration | kind (1 bit) | attempt | copy. The kind parts action noise from minibatch
orders."""
EVALUATION = 1 << 35
"""The first number of iterations and episodes of evaluations; training never reaches it."""


def episode_seed(seed: int, copy: int, episode: int) -> int:
    """Seed in [0, 2^31) of one episode of one environment copy (or of one group of copies)."""
    return int(np.random.SeedSequence([seed, copy, episode]).generate_state(1)[0] >> 1)


def action_noise(
    seed: int, iteration: int, copies: Iterable[int], steps: int, width: int, attempt: int = 0
) -> np.ndarray:
    """Uniforms in [0, 1) for the actions of one batch, (steps, copies, width), float64.

    Philox keyed by (seed, iteration, attempt, copy), so a copy draws the same numbers whichever worker holds it.
    """
    stream = iteration << (COPIES_BITS + ATTEMPT_BITS + 1) | attempt << COPIES_BITS
    blocks = [_generator(seed, stream | copy).random((steps, width)) for copy in copies]
    return np.stack(blocks, axis=1)


def permutation(seed: int, iteration: int, epoch: int, size: int) -> np.ndarray:
    """Order of the parts of a batch (time indices, or episodes) in one epoch, the same on every worker; (size,)."""
    # The kind bit keeps minibatch order and action noise from ever sharing a key.
    stream = (iteration << 1 | 1) << (COPIES_BITS + ATTEMPT_BITS) | epoch
    return _generator(seed, stream).permutation(size)


def team_order(seed: int, iteration: int, size: int) -> list[int]:
    """Order in which a sequential algorithm updates the policies of a team."""
    return list(map(int, permutation(seed, iteration, (1 << (COPIES_BITS + ATTEMPT_BITS)) - 1, size)))


def _generator(seed: int, stream: int) -> np.random.Generator:
    # numpy would make floats of a list with a number of 2^63 or more, and floats round.
    return np.random.Generator(np.random.Philox(key=np.array([seed & _MASK, stream & _MASK], np.uint64)))
