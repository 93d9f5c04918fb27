"""The gridworld adapter against its package, whose own rows are compiled in each process."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from multigrid.envs import CONFIGURATIONS

from marl_ray.envs.gridworld.environment import DONE, IDS, Gridworld


def package_env(env_id: str, **kwargs: Any) -> Any:
    package_class, defaults = CONFIGURATIONS[env_id]
    return package_class(**(defaults | kwargs))


def package_reset(env: Any, seed: int) -> dict[int, Any]:
    """Reset with the layout, too, drawn from the seed (the package alone takes it from the constructor's generator)."""
    gymnasium.Env.reset(env, seed=seed)
    env._RandomMixin__np_random = env.np_random  # noqa: SLF001  multigrid's
    return env.reset()[0]


def expected_row(observation: dict[str, Any], mission: list[int]) -> list[int]:
    return [*observation["image"].reshape(-1).tolist(), int(observation["direction"]), *mission]


def expected_mission(raw: Any) -> list[int]:
    """Index of the episode's mission among the possible ones; nothing where there is but one."""
    missions = [str(raw.mission_space.get(i)) for i in np.ndindex(tuple(raw.mission_space.nvec))]
    return [missions.index(str(raw.mission))] if len(missions) > 1 else []


VARIANTS: list[dict[str, Any]] = [
    {"agents": 1},
    {"agents": 2, "allow_agent_overlap": False},
    {"agents": 3, "joint_reward": True},
    {"agents": 2, "agent_view_size": 5, "failure_termination_mode": "any"},
]
SINGLE_ENDS = {"agents": 3, "success_termination_mode": "all", "failure_termination_mode": "all"}


@pytest.mark.parametrize("env_id", IDS)
def test_steps_equal_the_packages(env_id: str):
    """Random play: bit-identical rows, rewards and ends, in episodes that end in every way."""
    variants = VARIANTS if "Blocked" in env_id else [*VARIANTS, SINGLE_ENDS]
    rng = np.random.default_rng(0)
    # Forward, pick up and toggle often, so that objects are carried, doors opened and goals reached.
    chance = np.array([2, 2, 5, 2, 1, 3, 1]) / 16
    for kwargs in variants:
        env, raw = Gridworld(env_id, max_steps=120, **kwargs), package_env(env_id, max_steps=120, **kwargs)
        for seed in range(2):
            observations, _ = env.reset(seed=seed)
            expected = package_reset(raw, seed)
            mission = expected_mission(raw)
            assert {agent: row.tolist() for agent, row in observations.items()} == {
                f"agent_{i}": expected_row(observation, mission) for i, observation in expected.items()
            }
            while env.agents:
                alive = list(env.agents)
                actions = {agent: int(rng.choice(7, p=chance)) for agent in alive}
                step = env.step(actions)
                moves = {i: actions.get(agent, DONE) for i, agent in enumerate(env.possible_agents)}
                reference = raw.step(moves)
                for i, agent in enumerate(env.possible_agents):
                    if agent not in alive:
                        assert all(agent not in part for part in step)
                        continue
                    assert step[0][agent].tolist() == expected_row(reference[0][i], mission)
                    assert [step[k][agent] for k in (1, 2, 3)] == [reference[k][i] for k in (1, 2, 3)]
                    assert (agent in env.agents) == (not reference[2][i] and not reference[3][i])
                np.testing.assert_array_equal(env.world.grid.state, raw.grid.state)
                np.testing.assert_array_equal(env.world.rows, raw.agent_states.view(np.ndarray))
