"""Rows of categories as codes: each distinct row once, with the numbers of the weight rows that it adds up.

A gridworld's batch repeats itself: of 4,096 observations of an 8x8 grid a fifth are distinct at first, and a hundredth
once the team has learned. A network is a function of its row, so it evaluates each distinct row once.
"""

from functools import cache

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]  # numba has no types
def number_rows(rows: np.ndarray, factors: np.ndarray, numbers: np.ndarray, firsts: np.ndarray) -> int:
    """Write the number of the distinct row that each row (N, K) of integers equals, (N,), in the order in which they first
    appear, and each distinct row's first place, (N,). Returns how many there are. `factors` (K,) int64 make the hashes;
    rows of equal hashes are compared."""
    size = 1
    while size < 2 * len(rows):
        size *= 2
    table, hashes = np.full(size, -1, np.int64), np.empty(len(rows), np.int64)
    count = 0
    for i in range(len(rows)):
        row, mixed = rows[i], np.int64(0)
        for k in range(len(row)):
            mixed += np.int64(row[k]) * factors[k]
        slot = (mixed ^ (mixed >> 32)) & (size - 1)
        while table[slot] >= 0:
            number = table[slot]
            if hashes[number] == mixed and (rows[firsts[number]] == row).all():
                break
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot], hashes[count], firsts[count] = count, mixed, i
            count += 1
        numbers[i] = table[slot]
    return count


def coded_rows(rows: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes (U, K) int32 of the distinct rows among categories (N, K), and the number of each row's, (N,) int64.
    `offsets` (K,) are the numbers of the first weight row of every entry."""
    numbers, firsts = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    count = number_rows(rows, _factors(rows.shape[1]), numbers, firsts)
    return rows[firsts[:count]] + offsets, numbers


@cache
def _factors(width: int) -> np.ndarray:
    """Odd numbers (width,) that make the hashes of rows."""
    return np.random.default_rng(0).integers(-(2**62), 2**62, width) * 2 + 1
