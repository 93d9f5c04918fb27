"""Copies of one-agent environments that Gymnasium's `VectorEnv` or EnvPool steps together."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from typing_extensions import override

from marl_ray.closing import Unfinished
from marl_ray.envs.batch import BatchStep, EnvBatch, EpisodeMetrics, group_positions
from marl_ray.envs.flat_dicts import flat_rows, flat_space
from marl_ray.errors import MarlRayError

Seeds = Sequence[int | None]


class VectorBatch(EnvBatch):
    """`EnvBatch` of a Gymnasium `VectorEnv` whose `autoreset_mode` is `DISABLED`, and whose agent is the only one.

    An own environment returns it from `batch(copies, groups, signals)`. Copies that ended are reset together, at the next
    observation or step. While some copies are over and others play, all are stepped; results of the former are dropped.
    """

    has_automatic_reset = False
    """True if an ended copy may be stepped, and begins its next episode by itself."""
    can_replay = False

    def __init__(self, vector: Any, groups: Sequence[Sequence[str]], signals: int):
        """Make a batch of the copies of `vector`, which has as many as the batch.

        Raises MarlRayError if an observation is neither a Box nor categories, or if ended copies begin
        anew by themselves.
        """
        copies, space = vector.num_envs, flat_space(vector.single_observation_space)
        if isinstance(space, spaces.Tuple | spaces.Text):
            raise MarlRayError(f"observation space {space} is not supported in a VectorEnv: expected numbers")
        if not self.has_automatic_reset and (mode := vector.metadata.get("autoreset_mode")) != AutoresetMode.DISABLED:
            raise MarlRayError(f"autoreset_mode of the VectorEnv is {mode}, expected {AutoresetMode.DISABLED}")
        self.vector, self.signals = vector, signals
        self.agent = next(agent for group in groups for agent in group)
        group_positions([self.agent], groups)
        self.offset = int(space.start) if isinstance(space, spaces.Discrete) else 0
        self.alive = np.zeros((copies, 1), bool)
        self.action_masks: list[np.ndarray | None] = [None]
        self.latest: np.ndarray | None = None
        self.reports = [EpisodeMetrics() for _ in range(copies)]
        self.waiting: dict[int, int] = {}
        """Copy -> seed of the episode that it begins at the next observation or step."""

    @override
    def reset(self, copy: int, seed: int) -> None:
        self.waiting[copy] = seed
        self.reports[copy] = EpisodeMetrics()
        self.alive[copy] = True

    @override
    def step(self, actions: Sequence[np.ndarray]) -> BatchStep:
        self._begin(idle=~self.alive[:, 0])
        step = BatchStep.zeros(len(self.alive), 1, self.signals)
        observations, rewards, terminated, truncated, infos = self.vector.step(actions[0][:, 0])
        playing = self.alive[:, 0].copy()
        self._keep_observations(self._rows(observations), playing)
        step.rewards[playing, 0] = rewards[playing]
        step.terminated[playing, 0] = terminated[playing]
        step.truncated[playing, 0] = truncated[playing] & ~terminated[playing]
        if "cost" in infos:
            step.costs[playing, 0] = np.asarray(infos["cost"])[playing].reshape(-1, self.signals)
        if "metrics" in infos:
            self._add_metrics(infos["metrics"], playing)
        self.alive &= ~(step.terminated | step.truncated)
        self._update_masks(infos, playing)
        return step

    @override
    def observe(self, rows: Sequence[np.ndarray], copies: Sequence[int] | None = None) -> None:
        self._begin()
        numbers = range(len(self.alive)) if copies is None else copies
        if self.latest is not None and len(numbers):
            rows[0][numbers, 0] = self.latest[numbers] - self.offset if self.offset else self.latest[numbers]

    def replay(self, copy: int, seed: int, actions: Sequence[Sequence[np.ndarray]]) -> None:
        """Raise NotImplementedError: copies of a vector cannot be stepped apart from each other."""
        raise NotImplementedError("a VectorEnv steps all copies at once")

    @override
    def metrics(self, copy: int) -> dict[str, float]:
        return self.reports[copy].means()

    @override
    def close(self) -> None:
        self.vector.close()

    def _begin(self, idle: np.ndarray | None = None) -> None:
        """Begin the episodes that wait, and some episode in the copies that are `idle`, (copies,) bool.

        Those begin too because an ended copy cannot be stepped.
        """
        begun = np.zeros(len(self.alive), bool)
        begun[list(self.waiting)] = True
        mask = begun if idle is None or self.has_automatic_reset else begun | idle
        if not mask.any():
            return
        observations, infos = self._reset([self.waiting.get(c, 0) if mask[c] else None for c in range(len(mask))], mask)
        self.waiting = {}
        # A pool returns the observations of the copies that were reset alone.
        rows = self._rows(observations)
        self._keep_observations(rows if len(rows) == len(mask) else _spread(rows, mask), begun)
        self._update_masks(infos, begun)

    def _rows(self, observations: Any) -> np.ndarray:
        """Return the observations of some copies as arrays."""
        return flat_rows(observations, self.vector.single_observation_space)

    def _reset(self, seeds: Seeds, mask: np.ndarray) -> tuple[object, dict[str, object]]:
        """Begin the episodes of the copies in `mask` and return observations and infos."""
        options = None if mask.all() else {"reset_mask": mask}
        observations, infos = self.vector.reset(seed=list(seeds), options=options)
        return observations, infos

    def _update_masks(self, infos: dict[str, Any], copies: np.ndarray) -> None:
        """Keep the masks that `infos` have for these copies, (copies,) bool.

        All actions are possible without one.
        """
        new_masks, masks = infos.get("action_mask"), self.action_masks[0]
        if masks is not None:
            masks[copies] = True
        if new_masks is None:
            return
        if masks is None:
            masks = self.action_masks[0] = np.ones((len(self.alive), 1, int(self.vector.single_action_space.n)), bool)
        playing = copies & self.alive[:, 0] & infos.get("_action_mask", True)
        masks[playing, 0] = np.asarray(new_masks)[playing]
        if not masks.any(-1).all():
            raise MarlRayError("action mask of a VectorEnv: expected at least one action that is possible")

    def _add_metrics(self, metrics: dict[str, Any], copies: np.ndarray) -> None:
        """Note the numbers of a step, NAME -> (copies,), where `_NAME`, if there is one, says that a copy gave it."""
        for name, values in metrics.items():
            if name.removeprefix("_") == name or name[1:] not in metrics:
                for c in np.flatnonzero(copies & metrics.get(f"_{name}", True)):
                    self.reports[c].add(self.agent, {name: values[c]})

    def _keep_observations(self, observations: np.ndarray, copies: np.ndarray) -> None:
        """Keep the observations of these copies, (copies,) bool, as flat rows."""
        flat = np.asarray(observations).reshape(len(self.alive), -1)
        if self.latest is None:
            self.latest = flat.copy()
        else:
            self.latest[copies] = flat[copies]


class PoolBatch(VectorBatch):
    """`EnvBatch` of an EnvPool.

    A pool takes its seeds when it is made. When all copies begin episodes at once, as in evaluations and in batches of
    whole episodes, a pool with their seeds is made; else a copy's later episodes follow from the first one's seed.
    """

    has_automatic_reset = True

    def __init__(self, make: Callable[[list[int]], Any], copies: int, groups: Sequence[Sequence[str]], signals: int):
        """`make` makes the pool of as many copies as there are seeds. The errors are those of `VectorBatch`."""
        self.make = make
        with Unfinished() as unfinished:
            super().__init__(unfinished.keep(make([0] * copies)), groups, signals)
            unfinished.pop_all()
        shape: tuple[int, ...] = self.vector.single_observation_space.shape or ()
        self.channels_first = len(shape) == 3 and shape[0] < shape[-1]

    def _reset(self, seeds: Seeds, mask: np.ndarray) -> tuple[object, dict[str, object]]:
        if mask.all():
            self.vector.close()
            self.vector = self.make([int(seed or 0) for seed in seeds])
        return self.vector.reset(options={"reset_mask": mask})[0], {}

    def _keep_observations(self, observations: np.ndarray, copies: np.ndarray) -> None:
        super()._keep_observations(np.moveaxis(observations, 1, -1) if self.channels_first else observations, copies)


def _spread(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the rows of some copies at their places among all."""
    spread = np.zeros((len(mask), *rows.shape[1:]), rows.dtype)
    spread[mask] = rows
    return spread
