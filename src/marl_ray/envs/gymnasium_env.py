"""Gymnasium environments as PettingZoo environments of one agent."""

import difflib
from typing import Any

import gymnasium
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.errors import MarlRayError, one_line

PREFIX = "gymnasium."
"""The prefix of a Gymnasium id in a config's `env.id`."""
AGENT = "agent"


class SingleAgentEnv(ParallelEnv[str, Any, Any]):  # type: ignore[misc]  # PettingZoo has no types
    """A Gymnasium environment whose only agent is called `agent`.

    Spaces, rewards, ends and infos are its own.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str):
        self.env = env
        self.metadata = {**env.metadata, "name": name}
        self.render_mode = env.render_mode
        self.possible_agents = [AGENT]
        self.agents: list[str] = []

    @override
    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        return self.env.observation_space

    @override
    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return self.env.action_space

    @override
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.agents = [AGENT]
        return {AGENT: observation}, {AGENT: info}

    @override
    def step(
        self, actions: dict[str, object]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        observation, reward, terminated, truncated, info = self.env.step(actions[AGENT])
        if terminated or truncated:
            self.agents = []
        return (
            {AGENT: observation},
            {AGENT: float(reward)},
            {AGENT: bool(terminated)},
            {AGENT: bool(truncated)},
            {AGENT: info},
        )

    @override
    def render(self) -> object:
        return self.env.render()

    @override
    def close(self) -> None:
        self.env.close()


def single_agent(env_id: str, **kwargs: Any) -> ParallelEnv[str, Any, Any]:
    """Return the registered Gymnasium environment `env_id` (`CartPole-v1`); `kwargs` go to `gymnasium.make`.

    Raises MarlRayError naming `env.id` for an id that is not registered or whose packages are not installed.
    """
    try:
        return SingleAgentEnv(gymnasium.make(env_id, **kwargs), env_id)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        close = difflib.get_close_matches(env_id, gymnasium.registry, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(PREFIX + name for name in close)}?" if close else f" ({one_line(error)})"
        raise MarlRayError(f"env.id: {PREFIX + env_id!r} is unknown{hint}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise MarlRayError(f"env.id: cannot make {PREFIX + env_id!r} ({one_line(error)})") from error
