"""The actions of running episodes, also as text.

A resumed run replays them, so that no environment is ever pickled.
"""

import base64
import zlib
from collections.abc import Callable, Sequence

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
        low, high = actions.min(), actions.max()
        fitting = (kind for kind in SMALL_TYPES if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        actions = actions.astype(next(fitting, actions.dtype))
    return [actions.dtype.str, base64.b64encode(zlib.compress(actions.tobytes(), 1)).decode()]


def unpack_actions(text: Sequence[str], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the actions (S, *shape) of what `pack_actions` returned, as `dtype`."""
    kind, data = text
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), kind).reshape(-1, *shape).astype(dtype)


class ActionHistory:
    """The actions of the running episodes of a worker's environment copies.

    The copies step together, so they share the steps, and each has the step at which its episode began.
    """

    def __init__(self, copies: int, policies: int):
        self.policies = policies
        self.steps: list[list[np.ndarray]] = []
        """Each policy's actions (copies, agents, *shape) at every step since the oldest running episode began."""
        self.begins = np.zeros(copies, np.int64)
        """Index in `steps` at which each copy's episode began."""

    def begin_episode(self, copy: int) -> None:
        """Let the copy's next episode begin with the next step."""
        self.begins[copy] = len(self.steps)

    def add_steps(self, steps: Sequence[list[np.ndarray]]) -> None:
        """Add steps of all copies; their arrays must not change any more."""
        self.steps.extend(steps)

    def insert_episode(self, copy: int, steps: Sequence[Sequence[np.ndarray]]) -> None:
        """Insert the steps that a copy's episode has played; the copies before it have theirs already.

        Episodes of different lengths end at the same step, and the first step is that of the longest.
        """
        missing = len(steps) - len(self.steps)
        if missing > 0:
            empty = [np.zeros((len(self.begins), *actions.shape), actions.dtype) for actions in steps[0]]
            self.steps = [[array.copy() for array in empty] for _ in range(missing)] + self.steps
            self.begins[:copy] += missing
        self.begins[copy] = len(self.steps) - len(steps)
        for recorded, step in zip(self.steps[self.begins[copy] :], steps, strict=True):
            for array, actions in zip(recorded, step, strict=True):
                array[copy] = actions

    def drop_ended(self) -> None:
        """Drop the steps that no running episode has."""
        oldest = int(self.begins.min())
        self.steps = self.steps[oldest:]
        self.begins -= oldest

    def snapshot(self) -> Callable[[int], list[list[str]]]:
        """Return the function that packs a copy's episode of this moment, policy by policy.

        The function may be called in another thread while play continues.
        """
        steps, begins = list(self.steps), self.begins.tolist()

        def pack_episode(copy: int) -> list[list[str]]:
            episode = steps[begins[copy] :]
            return [pack_actions([step[policy][copy] for step in episode]) for policy in range(self.policies)]

        return pack_episode
