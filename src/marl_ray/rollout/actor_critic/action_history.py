"""The actions of running episodes as text: a resumed run replays them, so that no environment is ever pickled."""

import base64
import zlib
from collections.abc import Sequence

import numpy as np

SMALL_TYPES = (np.uint8, np.int8, np.int16, np.int32)
"""Number types that whole numbers are kept in, where they fit."""


def pack_actions(steps: Sequence[np.ndarray]) -> list[str]:
    """Return [number type, text] of the actions of S steps, of equal shapes.

    Whole numbers are kept in the smallest type: an action among a few takes about half a byte, so an episode of a
    million steps takes about half a megabyte per agent.
    """
    actions = np.stack(steps) if len(steps) else np.zeros(0, np.uint8)
    if actions.dtype.kind in "iu" and actions.size:
        bounds = [(kind, np.iinfo(kind)) for kind in SMALL_TYPES]
        low, high = actions.min(), actions.max()
        actions = actions.astype(next((k for k, at in bounds if at.min <= low and high <= at.max), actions.dtype))
    return [actions.dtype.str, base64.b64encode(zlib.compress(actions.tobytes(), 1)).decode()]


def unpack_actions(text: Sequence[str], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the actions (S, *shape) of what `pack_actions` returned, as `dtype`."""
    kind, data = text
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), kind).reshape(-1, *shape).astype(dtype)
