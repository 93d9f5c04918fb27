"""Numbers of random streams: one per response of a language model, the same whichever worker samples it."""

import hashlib
import struct

TRAINING, EVALUATION = 0, 1


def response_stream(kind: int, iteration: int, attempt: int, copy: int, agent: int, turn: int) -> int:
    """Stream of one response, in [0, 2^64): BLAKE2b over the six numbers as 64-bit integers.

    In training: (TRAINING, iteration, attempt, global copy, agent's number in `possible_agents`, the agent's turn); the
    attempt of a branch says also which turn it begins with (`branching.branches`). In evaluation: (EVALUATION, the caller's
    key, sample, task index, agent, turn), so that the two never share a stream.
    """
    packed = struct.pack("<6q", kind, iteration, attempt, copy, agent, turn)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
