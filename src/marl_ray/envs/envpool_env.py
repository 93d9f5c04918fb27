"""EnvPool's environments (https://github.com/sail-sg/envpool) of one agent, which C++ steps in batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.envs.flat_dicts import flat_rows, flat_space
from marl_ray.envs.vector import PoolBatch
from marl_ray.errors import MarlRayError, did_you_mean, install_hint

PREFIX = "envpool."
"""The prefix of an EnvPool id in a config's `env.id`."""
AGENT = "agent"


class EnvPoolEnv(ParallelEnv[str, Any, Any]):  # type: ignore[misc]  # PettingZoo has no types
    """A pool of one copy, whose only agent is called `agent`, and the maker of batches.

    Images come as (H, W, C), and dicts as rows of all their numbers. EnvPool's own arguments (`max_episode_steps`,
    `num_threads`, ...) are `env.kwargs`; a worker steps its copies in one thread unless told otherwise.
    """

    metadata = {"name": "envpool", "render_modes": []}

    def __init__(self, name: str, **kwargs: Any):
        """Make the pool of one copy of EnvPool's environment `name`.

        Raises MarlRayError naming `env.id` if EnvPool is not installed or does not know the name, or if there
        are several players.
        """
        try:
            import envpool
        except ImportError as error:
            raise MarlRayError(f"env.id: {PREFIX + name!r} needs EnvPool: {install_hint('envpool')}") from error
        env_names = envpool.list_all_envs()
        if name not in env_names:
            raise MarlRayError(f"env.id: {PREFIX + name!r} is unknown{did_you_mean(name, env_names)}")
        self.name, self.kwargs, self.render_mode = name, {"num_threads": 1} | kwargs, None
        self.pool = self._pool([0])
        if (players := self.pool.config.get("max_num_players", 1)) != 1:
            self.pool.close()
            raise MarlRayError(f"env.id: {PREFIX + name!r} has {players} players, expected one")
        self.possible_agents = [AGENT]
        self.agents: list[str] = []
        self._observation_space, self._action_space = (
            _channels_last(flat_space(self.pool.observation_space)),
            self.pool.action_space,
        )

    @override
    def observation_space(self, agent: str) -> Any:
        return self._observation_space

    @override
    def action_space(self, agent: str) -> Any:
        return self._action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode; with a seed in a new pool, because a pool takes its seeds only when it is made."""
        if seed is not None:
            self.pool.close()
            self.pool = self._pool([seed])
        observations, _ = self.pool.reset()
        self.agents = [AGENT]
        return {AGENT: self._view(observations)}, {AGENT: {}}

    @override
    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        observations, rewards, terminated, truncated, infos = self.pool.step(np.asarray(actions[AGENT])[None])
        if terminated[0] or truncated[0]:
            self.agents = []
        info = {"cost": float(infos["cost"][0])} if "cost" in infos else {}
        results = {AGENT: float(rewards[0])}, {AGENT: bool(terminated[0])}, {AGENT: bool(truncated[0])}
        return {AGENT: self._view(observations)}, *results, {AGENT: info}

    def batch(self, copies: int, groups: Sequence[Sequence[str]], signals: int) -> PoolBatch:
        """Return the copies that one pool steps together."""
        return PoolBatch(self._pool, copies, groups, signals)

    @override
    def close(self) -> None:
        self.pool.close()

    def _pool(self, seeds: list[int]) -> Any:
        import envpool

        try:
            return envpool.make(self.name, env_type="gymnasium", num_envs=len(seeds), seed=seeds, **self.kwargs)
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            raise MarlRayError(f"env.kwargs: {PREFIX + self.name} rejected {self.kwargs} ({error})") from error

    def _view(self, observations: Any) -> np.ndarray:
        observation: np.ndarray = flat_rows(observations, self.pool.observation_space)[0]
        return observation if observation.shape == self._observation_space.shape else np.moveaxis(observation, 0, -1)


def _channels_last(space: Any) -> Any:
    """Return the space of images (H, W, C) for one of (C, H, W); any other space as it is."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 3 or space.shape[0] >= space.shape[-1]:
        return space
    low, high = np.moveaxis(space.low, 0, -1), np.moveaxis(space.high, 0, -1)
    return spaces.Box(low, high, dtype=space.dtype)
