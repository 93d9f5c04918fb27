"""Random numbers that depend on their purpose, such as action noise, and not on the worker that draws them.

The number of a stream of an actor-critic has the bits iteration | kind (1 bit) | attempt | copy. The kind parts action
noise from minibatch orders, which have the number of the order in place of attempt and copy. `config.random_streams`
has the sizes.
"""

import hashlib
import struct
from collections.abc import Iterable

import numpy as np

from marl_ray.config.random_streams import COPY_BITS, ORDER_BITS

UINT64_MASK = (1 << 64) - 1
"""The lowest 64 bits, which are as many as each number of Philox's key has."""
EVALUATION_START = 1 << 35
"""The first number of iterations and episodes of evaluations; training never reaches it."""
TRAINING_STREAMS, EVALUATION_STREAMS = 0, 1
"""The first of the six numbers of a response's stream."""


def episode_seed(seed: int, copy: int, episode: int) -> int:
    """Return the seed in [0, 2^31) of one episode of one environment copy (or of one group of copies)."""
    return int(np.random.SeedSequence([seed, copy, episode]).generate_state(1)[0] >> 1)


def action_stream(iteration: int, attempt: int, copy: int) -> int:
    """Return the number of the stream that one copy's actions of one attempt at a batch are drawn from."""
    return iteration << (ORDER_BITS + 1) | attempt << COPY_BITS | copy


def order_stream(iteration: int, order: int) -> int:
    """Return the number of the stream that one order of a batch's parts is drawn from.

    The number is never one of `action_stream`.
    """
    return (iteration << 1 | 1) << ORDER_BITS | order


def action_noise(
    seed: int, iteration: int, copies: Iterable[int], steps: int, width: int, attempt: int = 0
) -> np.ndarray:
    """Return the uniforms in [0, 1) for the actions of one batch, (steps, copies, width), float64.

    Philox keyed by (seed, iteration, attempt, copy), so a copy draws the same numbers whichever worker holds it.
    """
    blocks = [_generator(seed, action_stream(iteration, attempt, copy)).random((steps, width)) for copy in copies]
    return np.stack(blocks, axis=1)


def permutation(seed: int, iteration: int, epoch: int, size: int) -> np.ndarray:
    """Return the order (size,) of a batch's parts, time indices or episodes, in one epoch; the same on every worker."""
    return _generator(seed, order_stream(iteration, epoch)).permutation(size)


def team_order(seed: int, iteration: int, size: int) -> list[int]:
    """Return the order in which a sequential algorithm updates the policies of a team."""
    return list(map(int, permutation(seed, iteration, (1 << ORDER_BITS) - 1, size)))


def response_stream(kind: int, iteration: int, attempt: int, copy: int, agent: int, turn: int) -> int:
    """Return the number of one response's stream, in [0, 2^64).

    The number is BLAKE2b over the six numbers as 64-bit integers. In training: (TRAINING_STREAMS, iteration, attempt,
    global copy, agent's number in `possible_agents`, the agent's turn); the attempt of a branch says also which turn it
    begins with (`branching.make_branches`). In evaluation: (EVALUATION_STREAMS, the caller's key, sample, task index,
    agent, turn), so that the two never share a stream.
    """
    packed = struct.pack("<6q", kind, iteration, attempt, copy, agent, turn)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def task_number(task_id: str) -> int:
    """Return the number of a task in streams, in [0, 2^63).

    The number is a hash, so that it depends on no other task.
    """
    digest = hashlib.blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _generator(seed: int, stream: int) -> np.random.Generator:
    """Return the Philox generator of a stream."""
    # numpy would make floats of a list with a number of 2^63 or more, and floats round.
    return np.random.Generator(np.random.Philox(key=np.array([seed & UINT64_MASK, stream & UINT64_MASK], np.uint64)))
