"""Observations that are dicts of numbers, as rows of all their numbers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_ray.errors import MarlRayError


def flat_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the Box (D,) float32 of all numbers of a Dict; any other space is returned as it is.

    Raises MarlRayError if an entry is neither a Box nor categories.
    """
    if not isinstance(space, spaces.Dict):
        return space
    low, high = zip(*_yield_bounds(space), strict=True)
    return spaces.Box(np.concatenate(low), np.concatenate(high), dtype=np.float32)


def flat_rows(observations: Any, space: spaces.Space[Any]) -> np.ndarray:
    """Return the rows (N, D) float32 of N copies' observations, in the order of `flat_space`.

    Observations that are no dict are returned as they are.
    """
    if not isinstance(space, spaces.Dict):
        return np.asarray(observations)
    parts = [flat_rows(observations[key], entry) for key, entry in space.items()]
    return np.concatenate([part.reshape(len(part), -1).astype(np.float32) for part in parts], 1)


def _yield_bounds(space: spaces.Space[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the least and the greatest numbers of each entry, flat."""
    low: Any
    high: Any
    match space:
        case spaces.Dict():
            for entry in space.values():
                yield from _yield_bounds(entry)
            return
        case spaces.Box():
            low, high = space.low, space.high
        case spaces.Discrete():
            low, high = space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            low, high = space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            low, high = np.zeros(space.shape), np.ones(space.shape)
        case _:
            raise MarlRayError(f"observation space {space} is not supported in a Dict: expected numbers")
    yield np.ravel(low).astype(np.float32), np.ravel(high).astype(np.float32)
