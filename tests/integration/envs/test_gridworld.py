"""The gridworld adapter: PettingZoo's rules, its package step by step, and what it adds."""

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from multigrid.core.world_object import Lava
from multigrid.envs import CONFIGURATIONS
from pettingzoo.test import parallel_api_test, parallel_seed_test

from marl_ray.config import CostConfig, EnvConfig
from marl_ray.envs.copies import warm_up
from marl_ray.envs.gridworld import moves
from marl_ray.envs.gridworld.environment import DONE, FORWARD, IDS, LEFT, RIGHT, Gridworld
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError

SPREAD = "mpe2.simple_spread_v3"
EMPTY = "MultiGrid-Empty-5x5-v0"


def build(env_id: str, cost: dict[str, float] | None = None, **kwargs: Any) -> Any:
    return make_env(EnvConfig(id=env_id, kwargs=kwargs, cost=cost or {}))


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
def test_steps_equal_the_packages(env_id):
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
                package_moves = {i: actions.get(agent, DONE) for i, agent in enumerate(env.possible_agents)}
                reference = raw.step(package_moves)
                for i, agent in enumerate(env.possible_agents):
                    if agent not in alive:
                        assert all(agent not in part for part in step)
                        continue
                    assert step[0][agent].tolist() == expected_row(reference[0][i], mission)
                    assert [step[k][agent] for k in (1, 2, 3)] == [reference[k][i] for k in (1, 2, 3)]
                    assert (agent in env.agents) == (not reference[2][i] and not reference[3][i])
                np.testing.assert_array_equal(env.world.grid.state, raw.grid.state)
                np.testing.assert_array_equal(env.world.rows, raw.agent_states.view(np.ndarray))


@pytest.mark.parametrize("env_id", [*IDS, SPREAD])
def test_gridworlds_keep_pettingzoos_contract(env_id):
    kwargs = {"agents": 3, "max_steps": 30} if env_id in IDS else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # style advice of the tests; failures are assertions
        parallel_api_test(build(env_id, **kwargs), num_cycles=100)
        parallel_seed_test(lambda: build(env_id, **kwargs), num_cycles=40)


def test_spaces_and_types_are_those_of_the_parallel_api():
    env = build(EMPTY, agents=2)
    space = env.observation_space("agent_0")
    assert space.nvec.tolist() == [11, 6, 4] * 49 + [4] and space.dtype == np.int8
    assert space is env.observation_space("agent_0") and env.action_space("agent_1").n == 7
    observations, infos = env.reset(seed=0)
    assert all(observations[agent] in env.observation_space(agent) for agent in env.agents)
    assert observations["agent_0"].dtype == np.int8 and infos == {"agent_0": {}, "agent_1": {}}
    _, rewards, terminated, truncated, infos = env.step({"agent_0": np.int64(FORWARD), "agent_1": LEFT})
    assert [type(x["agent_0"]) for x in (rewards, terminated, truncated, infos)] == [float, bool, bool, dict]
    assert build(EMPTY).possible_agents == ["agent_0"]


def test_mission_is_the_real_target():
    """The last entry names the box in the grid; 12 missions: 6 colours, box or key."""
    env = build("MultiGrid-BlockedUnlockPickup-v0")
    missions = set()
    for seed in range(12):
        observations, _ = env.reset(seed=seed)
        row = observations["agent_0"]
        assert row.shape == (149,) and env.observation_space("agent_0").nvec[-1] == 12
        colour = int(env.world.obj[1])
        assert row[-1] == colour * 2  # colours first, then (box, key)
        missions.add(int(row[-1]))
    assert len(missions) > 2


def test_reset_without_seed_goes_on_from_the_last_seed():
    def layouts(env: Any) -> list[list[int]]:
        first = env.reset(seed=3)[0]["agent_0"].tolist()
        return [first, *(env.reset()[0]["agent_0"].tolist() for _ in range(3))]

    used = build("MultiGrid-Empty-Random-6x6-v0")
    used.reset(seed=9)
    assert layouts(used) == layouts(build("MultiGrid-Empty-Random-6x6-v0"))
    assert len({tuple(row) for row in layouts(used)}) > 1


def test_agents_finish_one_by_one():
    env = build(EMPTY, agents=2, success_termination_mode="all")
    env.reset(seed=0)
    for action in (FORWARD, FORWARD, RIGHT, FORWARD):  # agent_0 walks to the goal; agent_1 stays
        env.step({"agent_0": action, "agent_1": DONE})
    observations, rewards, terminated, truncated, _ = env.step({"agent_0": FORWARD, "agent_1": DONE})
    assert set(observations) == {"agent_0", "agent_1"} and rewards == {"agent_0": 1 - 0.9 * 5 / 100, "agent_1": 0}
    assert terminated == {"agent_0": True, "agent_1": False} and not any(truncated.values())
    assert env.agents == ["agent_1"]
    for part in env.step({"agent_1": DONE}):
        assert set(part) == {"agent_1"}
    for action in (FORWARD, FORWARD, RIGHT, FORWARD, FORWARD):
        *_, terminated, _, _ = env.step({"agent_1": action})
    assert terminated == {"agent_1": True} and env.agents == []


def test_lava_ends_only_the_agent_on_it():
    """No id of the package has lava, but the adapter's moves know it as the package's do."""
    env = build(EMPTY, agents=2)
    env.reset(seed=0)
    env.world.grid.set(2, 1, Lava())
    _, rewards, terminated, _, _ = env.step({"agent_0": FORWARD, "agent_1": DONE})
    assert terminated == {"agent_0": True, "agent_1": False} and rewards == {"agent_0": 0, "agent_1": 0}
    assert env.agents == ["agent_1"]


def test_truncation_ends_all():
    env = build(EMPTY, agents=2, max_steps=3)
    env.reset(seed=0)
    for t in range(3):
        assert env.agents == ["agent_0", "agent_1"]
        *_, terminated, truncated, _ = env.step({"agent_0": LEFT, "agent_1": LEFT})
        assert not any(terminated.values()) and set(truncated.values()) == {t == 2}
    assert env.agents == []


@pytest.mark.parametrize(("collision", "action"), [(1.0, 0.0), (0.0, 0.25), (1.0, 0.25)])
def test_collisions_and_actions_cost_what_the_config_says(collision, action):
    env = build(EMPTY, {"collision": collision, "action": action}, agents=2)
    _, infos = env.reset(seed=0)
    assert infos == {"agent_0": {"cost": 0.0}, "agent_1": {"cost": 0.0}}

    def costs(a: int, b: int) -> tuple[float, float]:
        infos = env.step({"agent_0": a, "agent_1": b})[4]
        return infos["agent_0"]["cost"], infos["agent_1"]["cost"]

    assert costs(FORWARD, DONE) == (action, 0.0)  # both start at (1, 1) facing right in a room 3 wide
    assert costs(FORWARD, LEFT) == (action, action)
    assert costs(FORWARD, FORWARD) == (collision + action, collision + action)  # both face walls
    assert costs(LEFT, DONE) == (action, 0.0)


def test_an_agent_in_the_way_is_a_collision():
    env = build(EMPTY, {"collision": 2.0}, agents=2, allow_agent_overlap=False)
    env.reset(seed=0)
    assert [i["cost"] for i in env.step({"agent_0": FORWARD, "agent_1": DONE})[4].values()] == [0.0, 0.0]
    assert [i["cost"] for i in env.step({"agent_0": DONE, "agent_1": FORWARD})[4].values()] == [0.0, 2.0]


def test_a_picture_changes_no_episode_and_is_none_without_a_render_mode():
    env = build(EMPTY, agents=2, render_mode="rgb_array")
    before, _ = env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (160, 160, 3) and picture.dtype == np.uint8 and len(np.unique(picture)) > 3
    after = env.step({"agent_0": DONE, "agent_1": DONE})[0]
    np.testing.assert_array_equal(before["agent_0"], after["agent_0"])
    env.close()
    quiet = build(EMPTY)
    quiet.reset(seed=0)
    assert quiet.render() is None


def test_a_warm_up_of_a_gridworld_compiles_the_step_of_workers():
    warm_up(EnvConfig(id=EMPTY))
    assert moves.step_copies.signatures


def test_no_room_is_an_error_and_no_hang():
    env = build("MultiGrid-Empty-Random-5x5-v0", agents=10)  # 8 free cells
    with pytest.raises(MarlRayError, match=r"env\.kwargs: MultiGrid-Empty-Random-5x5-v0 has no room"):
        env.reset(seed=0)


def test_missing_or_impossible_actions_are_errors():
    env = Gridworld(EMPTY, CostConfig(), agents=2)
    env.reset(seed=0)
    with pytest.raises(KeyError, match="agent_1"):
        env.step({"agent_0": 0})
    with pytest.raises(ValueError, match="action 7 of agent_0"):
        env.step({"agent_0": 7, "agent_1": DONE})
