"""The numbers of random streams. Each response of a language model has one, which does not depend on the worker that
samples it."""

import hashlib
import struct

TRAINING, EVALUATION = 0, 1


def response_stream(kind: int, iteration: int, attempt: int, copy: int, agent: int, turn: int) -> int:
    """The number of one response's stream, in [0, 2^64): BLAKE2b over the six numbers as 64-bit integers.

    In training: (TRAINING, iteration, attempt, global copy, agent's number in `possible_agents`, the agent's turn); the
    attempt of a branch says also which turn it begins with (`branching.branches`). In evaluation: (EVALUATION, the caller's
    key, sample, task index, agent, turn), so that the two never share a stream.
    """
    packed = struct.pack("<6q", kind, iteration, attempt, copy, agent, turn)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def task_number(task_id: str) -> int:
    """The number of a task in streams: 63 bits of a hash, so that it depends on no other task."""
    digest = hashlib.blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
