"""Uniform numbers for sampled tokens: a function of (seed, stream, token) alone.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3), written
over arrays: the key is the seed, the counter is (token // 2, 0, stream), and a block of four words gives two tokens'
numbers. NumPy's own Philox makes one generator per key, which costs more than a decoding step of a small model.
"""

from collections.abc import Sequence

import numpy as np

# Constants of the paper: ten rounds, which it found to pass all tests of randomness, and those of its table 2.
_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_UINT64_MASK = (1 << 64) - 1
"""The lowest 64 bits: seeds and streams of Python may have more, or a sign."""


def token_uniforms(seed: int, streams: Sequence[int], tokens: int) -> np.ndarray:
    """Return the uniforms in [0, 1 - 2^-52] of tokens 0, 1, ... of each stream, (len(streams), tokens) float64.

    `seed` and `streams` count modulo 2^64. The uniforms have 52 bits, not 53, so that a uniform times a sum of
    probabilities is always rounded to below that sum.
    """
    stream = np.array([number & _UINT64_MASK for number in streams], np.uint64)[:, None]
    block = np.arange((tokens + 1) // 2, dtype=np.uint64)[None, :]
    shape = np.broadcast_shapes(stream.shape, block.shape)
    counter = [np.broadcast_to(word, shape) for word in (block, block * 0, stream & _LOW_WORD, stream >> _WORD_BITS)]
    key = np.uint64(seed & _UINT64_MASK)
    words = philox(counter, (key & _LOW_WORD, key >> _WORD_BITS))
    pairs = np.stack([words[1] << _WORD_BITS | words[0], words[3] << _WORD_BITS | words[2]], axis=-1)
    return (pairs.reshape(len(streams), -1)[:, :tokens] >> np.uint64(12)) * 2.0**-52


def philox(counter: Sequence[np.ndarray], key: tuple[np.uint64, np.uint64]) -> list[np.ndarray]:
    """Return Philox4x32-10 of four counter words and two key words, each 32 bits held in uint64 arrays of one shape."""
    a, b, c, d = counter
    key_a, key_b = key
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = second >> _WORD_BITS ^ b ^ key_a
        b = second & _LOW_WORD
        c = first >> _WORD_BITS ^ d ^ key_b
        d = first & _LOW_WORD
        key_a, key_b = key_a + _KEY_STEPS[0] & _LOW_WORD, key_b + _KEY_STEPS[1] & _LOW_WORD
    return [a, b, c, d]
