"""Spaces of observations and actions: their plain-data form, and flat rows of numbers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonObject

CATEGORICAL_SPACES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def space_to_json(space: spaces.Space[Any]) -> dict[str, object]:
    """Return plain data of a supported space.

    `space_from_json` is the inverse. Raises MarlRayError on other spaces.
    """
    match space:
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete() if space.nvec.ndim == 1 and not np.any(space.start):
            return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "dtype": str(space.dtype)}
        case spaces.MultiBinary() if isinstance(space.n, (int, np.integer)):
            return {"type": "MultiBinary", "n": int(space.n)}
        case spaces.Box():
            low, high = (_constant_or_list(bound) for bound in (space.low, space.high))
            return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    raise MarlRayError(f"space {space} is not supported: expected Box, Discrete, MultiDiscrete or MultiBinary")


def space_from_json(data: JsonObject) -> spaces.Space[Any]:
    """Return the space that `space_to_json` described.

    Raises MarlRayError for a type of space that this version does not know.
    """
    match data["type"]:
        case "Discrete":
            return spaces.Discrete(data["n"], start=data["start"])
        case "MultiDiscrete":
            return spaces.MultiDiscrete(data["nvec"], dtype=np.dtype(data["dtype"]).type)
        case "MultiBinary":
            return spaces.MultiBinary(data["n"])
        case "Box":
            shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
            low, high = (np.broadcast_to(_bound(data[key], dtype), shape) for key in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
    expected = "expected Box, Discrete, MultiDiscrete or MultiBinary"
    raise MarlRayError(f"space type {data['type']!r} is unknown: {expected}")


def _constant_or_list(bound: np.ndarray) -> object:
    """Return a bound as plain data. JSON has no infinity, so infinite bounds are text."""
    plain = bound.flat[0].item() if bound.size and np.all(bound == bound.flat[0]) else bound.tolist()
    return _finite_or_text(plain)


def _finite_or_text(value: Any) -> object:
    if isinstance(value, list):
        return [_finite_or_text(part) for part in value]
    return value if math.isfinite(value) else str(value)


def _bound(value: object, dtype: np.dtype[Any]) -> np.ndarray:
    """Undo `_constant_or_list`."""
    if isinstance(value, list):
        return np.array([_bound(part, dtype) for part in value], dtype)
    return np.asarray(float(value) if isinstance(value, str) else value, dtype)


def row_size(space: spaces.Space[Any]) -> int:
    """Return the length of an observation's flat row."""
    return math.prod(space.shape or ()) if not isinstance(space, spaces.Discrete) else 1


def row_dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    """Return the number type of an observation's flat row.

    Categories and pixels have a small integer, all else float32. Raises MarlRayError for another kind of space.
    """
    if isinstance(space, spaces.MultiDiscrete) and np.any(space.start):
        raise MarlRayError(f"observation space {space} is not supported: expected categories from 0")
    if isinstance(space, CATEGORICAL_SPACES):
        return np.dtype(np.int8 if max(cardinalities(space)) <= 127 else np.int32)
    if isinstance(space, spaces.Box):
        return np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)
    raise MarlRayError(
        f"observation space {space} is not supported: expected Box, Discrete, MultiDiscrete, MultiBinary"
    )


def cardinalities(space: spaces.Space[Any]) -> list[int]:
    """Return the number of categories of every entry of a categorical space's row.

    Raises MarlRayError for a space that is not categorical.
    """
    match space:
        case spaces.Discrete():
            return [int(space.n)]
        case spaces.MultiDiscrete():
            return [int(n) for n in space.nvec.reshape(-1)]
        case spaces.MultiBinary():
            return [2] * row_size(space)
    raise MarlRayError(f"space {space} is not categorical: expected Discrete, MultiDiscrete or MultiBinary")


def to_row(space: spaces.Space[Any], observation: object) -> np.ndarray:
    """Return the flat row of one observation, or of a batch with one leading dimension.

    Categories count from zero.
    """
    row = np.asarray(observation)
    return row - int(space.start) if isinstance(space, spaces.Discrete) and space.start else row


def consists_of(data: list[object], kinds: set[type]) -> bool:
    """Return True if nested lists hold nothing but these types.

    The function does not use numpy, which would give every text of a list the memory of the longest.
    """
    parts = [data]
    for part in parts:  # the list grows while the loop goes over it
        types = set(map(type, part))
        if not types <= kinds | {list}:
            return False
        if list in types:
            parts.extend(item for item in part if type(item) is list)
    return True


def joint_space(parts: Sequence[spaces.Space[Any]]) -> spaces.Space[Any]:
    """Return the space of several agents' rows side by side, which a central critic reads.

    The joint space is categorical if all parts are, otherwise an unbounded Box of floats.
    """
    if all(isinstance(part, CATEGORICAL_SPACES) for part in parts):
        nvec = [n for part in parts for n in cardinalities(part)]
        return spaces.MultiDiscrete(nvec, dtype=np.result_type(*(row_dtype(part) for part in parts)).type)
    return spaces.Box(-np.inf, np.inf, (sum(row_size(part) for part in parts),), np.float32)
