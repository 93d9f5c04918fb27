"""Rows of categories as codes: each distinct row once, and each distinct combination of neighbouring entries once.

A gridworld's batch repeats itself. Of 4,096 observations of an 8x8 grid, of 148 entries each, a fifth are distinct at first
and a hundredth once the team has learned, and the three entries of a cell have eight combinations. A network is a function
of its row, so it evaluates each distinct row once, and its first layer adds up one sum for each combination.
"""

from dataclasses import dataclass
from functools import cache

import numba
import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.policies.actor_critic.compiled.arguments import NetworkInputs

MAX_GROUP_SIZE = 512
"""Maximum number of combinations of neighbouring entries that share codes."""


@numba.njit(cache=True, nogil=True)
def number_rows(rows: np.ndarray, factors: np.ndarray, numbers: np.ndarray, firsts: np.ndarray) -> int:
    """Write the number of the distinct row that each row equals into `numbers` (N,), and return how many there are.

    `rows` are (N, K) integers. The distinct rows are numbered in the order in which they first appear, and `firsts`
    gets each one's first place. `factors` (K,) int64 make the hashes; rows of equal hashes are compared.
    """
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
            if hashes[table[slot]] == mixed:
                other, differing = rows[firsts[table[slot]]], 0
                for k in range(len(row)):  # without an end at the first, it compares many entries at once
                    differing += other[k] != row[k]
                if not differing:
                    break
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot], hashes[count], firsts[count] = count, mixed, i
            count += 1
        numbers[i] = table[slot]
    return count


@numba.njit(cache=True, nogil=True)
def number_codes(
    rows: np.ndarray, firsts: np.ndarray, sizes: np.ndarray, groups: np.ndarray, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Write the codes (U, G) of the rows numbered `firsts`, and return the weight rows of all codes, and their bounds.

    `sizes` (K,) are the categories of every entry. Group g joins the entries from `groups[g]` to `groups[g + 1]`, and every
    combination that occurs there is a code.
    """
    max_combinations, places = 1, 0
    for g in range(len(groups) - 1):
        combinations = 1
        for k in range(groups[g], groups[g + 1]):
            combinations *= sizes[k]
        max_combinations = max(max_combinations, combinations)
    code_of = np.empty(max_combinations, np.int32)
    parts = np.empty(len(firsts) * rows.shape[1], np.int32)
    bounds = np.zeros(len(firsts) * (len(groups) - 1) + 1, np.int64)
    count, filled = 0, 0
    for g in range(len(groups) - 1):
        code_of[:] = -1
        for u in range(len(firsts)):
            row, place = rows[firsts[u]], 0
            for k in range(groups[g], groups[g + 1]):
                place = place * sizes[k] + row[k]
            if code_of[place] < 0:
                offset = places
                for k in range(groups[g], groups[g + 1]):
                    parts[filled] = offset + row[k]
                    offset += sizes[k]
                    filled += 1
                code_of[place] = count
                count += 1
                bounds[count] = filled
            codes[u, g] = code_of[place]
        for k in range(groups[g], groups[g + 1]):
            places += sizes[k]
    return parts[:filled], bounds[: count + 1]


@numba.njit(cache=True, nogil=True)
def first_outside(rows: np.ndarray, firsts: np.ndarray, sizes: np.ndarray) -> int:
    """Return the first of `firsts` whose row (K,) has an entry that is none of its categories; -1 if none has.

    The categories are 0 to `sizes[k] - 1`. Another entry would write beyond the arrays of `number_codes`.
    """
    for place in firsts:
        row, outside = rows[place], 0
        for k in range(len(row)):
            outside += (row[k] < 0) | (row[k] >= sizes[k])
        if outside:
            return int(place)
    return -1


@numba.njit(cache=True, nogil=True)
def sort_by_row(decisions: np.ndarray, numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the `decisions` (n,) by their rows, of which there are `count`; decision d reads row `numbers[d]`.

    Returns the rows that some decision reads (R,), the bounds of each one's decisions (R + 1,), and the decisions (n,).
    """
    places, used, bounds = np.zeros(count + 1, np.int64), np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    for d in decisions:
        places[numbers[d] + 1] += 1
    rows, sorted_decisions = 0, np.empty(len(decisions), np.int64)
    for row in range(count):
        if places[row + 1]:
            used[rows], rows = row, rows + 1
        places[row + 1] += places[row]
        bounds[rows] = places[row + 1]
    for d in decisions:
        sorted_decisions[places[numbers[d]]] = d
        places[numbers[d]] += 1
    return used[:rows], bounds[: rows + 1], sorted_decisions


@dataclass(frozen=True)
class Categories:
    """The categories of a network's entries."""

    sizes: np.ndarray
    """(K,) int64: how many each entry has."""
    groups: np.ndarray
    """(G + 1,) int64: the first entry of each group that shares codes, and K."""

    @classmethod
    def from_offsets(cls, offsets: np.ndarray, count: int) -> "Categories":
        """Make categories from the number of each entry's first weight row (K,), and that of all."""
        sizes = np.diff(np.append(offsets, count)).astype(np.int64)
        groups, combinations = [0], 1
        for k, size in enumerate(sizes.tolist()):
            combinations *= size
            if combinations > MAX_GROUP_SIZE and k > groups[-1]:
                groups.append(k)
                combinations = size
        return cls(sizes, np.array([*groups, len(sizes)]))

    def inputs(self, rows: np.ndarray) -> NetworkInputs:
        """Return the distinct rows among categories (N, K).

        Raises MarlRayError if an entry is none of its categories.
        """
        numbers, firsts = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        firsts = firsts[: number_rows(rows, _factors(rows.shape[1]), numbers, firsts)]
        if (place := first_outside(rows, firsts, self.sizes)) >= 0:
            k = int(np.argmax((rows[place] < 0) | (rows[place] >= self.sizes)))
            raise MarlRayError(
                f"observation: entry {k} is category {rows[place, k]}, expected 0 to {self.sizes[k] - 1}"
            )
        codes = np.empty((len(firsts), len(self.groups) - 1), np.int32)
        parts, bounds = number_codes(rows, firsts, self.sizes, self.groups, codes)
        return NetworkInputs(np.empty((0, 0), np.float32), codes, parts, bounds, numbers)


@cache
def _factors(width: int) -> np.ndarray:
    """Return the odd numbers (width,) that make the hashes of rows."""
    return np.random.default_rng(0).integers(-(2**62), 2**62, width) * 2 + 1
