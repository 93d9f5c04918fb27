"""Environments: the gridworld adapter against its package, and everything `make_env` accepts and refuses."""

import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from multigrid.core.world_object import Lava
from multigrid.envs import CONFIGURATIONS
from pettingzoo.test import parallel_api_test, parallel_seed_test

from marl_ray.api.training import environment_warning
from marl_ray.config import CostConfig, EnvConfig, RunConfig, parse_config
from marl_ray.conformance.extensions.environment import check, first_fault
from marl_ray.envs.env_copies import warm_up
from marl_ray.envs.gridworld import moves
from marl_ray.envs.gridworld.environment import DONE, FORWARD, IDS, LEFT, RIGHT, Gridworld
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError

SPREAD = "mpe2.simple_spread_v3"
EMPTY = "MultiGrid-Empty-5x5-v0"


def build(env_id: str, cost: dict[str, float] | None = None, **kwargs: Any) -> Any:
    return make_env(EnvConfig(id=env_id, kwargs=kwargs, cost=cost or {}))


def test_ids_are_the_packages():
    assert len(IDS) == 13 and set(IDS) == set(CONFIGURATIONS)


@pytest.mark.parametrize("env_id", [*IDS, SPREAD])
def test_pettingzoo_contract(env_id: str):
    kwargs = {"agents": 3, "max_steps": 30} if env_id in IDS else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # style advice of the tests; failures are assertions
        parallel_api_test(build(env_id, **kwargs), num_cycles=100)
        parallel_seed_test(lambda: build(env_id, **kwargs), num_cycles=40)


def package_env(env_id: str, **kwargs: Any) -> Any:
    package_class, defaults = CONFIGURATIONS[env_id]
    return package_class(**(defaults | kwargs))


def package_reset(env: Any, seed: int) -> dict[int, Any]:
    """Reset with the layout, too, drawn from the seed (the package alone takes it from the constructor's generator)."""
    gymnasium.Env.reset(env, seed=seed)
    env._RandomMixin__np_random = env.np_random
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


def test_spaces_and_types():
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
def test_costs(collision: float, action: float):
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


def test_render_and_close():
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


@pytest.mark.parametrize("name", ["Counter", "Turns"])
def test_user_environments(name: str):
    env = build(f"sample_envs:{name}", length=2)
    observations, _ = env.reset(seed=0)
    assert observations == {"a": 0, "b": 0}
    env.step({"a": 0, "b": 1})
    observations, _, _, truncated, _ = env.step({"a": 0, "b": 1})
    assert observations == {"a": 2, "b": 2} and truncated == {"a": True, "b": True} and not env.agents


def test_a_warm_up_of_a_gridworld_compiles_the_step_of_workers():
    warm_up(EnvConfig(id=EMPTY))
    assert moves.play.signatures


def test_a_warm_up_resets_steps_once_and_closes():
    import sample_envs

    sample_envs.Recorded.calls.clear()
    warm_up(EnvConfig(id="sample_envs:Recorded"))
    assert sample_envs.Recorded.calls == ["reset", "step", "close"]


def test_a_warm_up_refuses_a_reward_that_is_not_finite():
    with pytest.raises(MarlRayError, match="gives a a reward of nan, expected a finite number"):
        warm_up(EnvConfig(id="sample_envs:Unpaid"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"id": "CartPole-v1"}, "env.id: 'CartPole-v1' is unknown; expected one of budget_dag, code_team"),
    ({"id": "MultiGrid-Empty-8x8"}, "env.id: 'MultiGrid-Empty-8x8' is unknown; did you mean MultiGrid-Empty-8x8-v0"),
    ({"id": "MultiGrid-"}, "env.id: 'MultiGrid-' is unknown; did you mean MultiGrid-"),
    ({"id": "mpe2.simple_spred_v3"}, "env.id: 'mpe2.simple_spred_v3' is unknown; did you mean mpe2.simple_spread_v3"),
    ({"id": "mpe2.simple_spread"}, "env.id: 'mpe2.simple_spread' is unknown; did you mean mpe2.simple_spread_v3"),
    ({"id": "no_such_module:make"}, "env.id: cannot import 'no_such_module' of 'no_such_module:make' (ModuleNotFound"),
    ({"id": ":make"}, "env.id: expected package.module:NAME, got ':make'"),
    ({"id": "sample_envs:Count"}, "env.id: 'Count' of 'sample_envs:Count' is not in the module; did you mean Counter"),
    ({"id": "sample_envs.Counter"}, "env.id: 'sample_envs.Counter' is unknown; did you mean sample_envs:Counter?"),
    ({"id": "no_such.module.Counter"}, "env.id: 'no_such.module.Counter' is unknown; expected one of budget_dag"),
    ({"id": "mpe2.chess_against_itself"}, "env.id: 'mpe2.chess_against_itself' is unknown; expected one of mpe2."),
    ({"id": "sample_envs:"}, "env.id: expected package.module:NAME, got 'sample_envs:'"),
    ({"id": "sample_envs:NOT_CALLABLE"}, "env.id: 'sample_envs:NOT_CALLABLE' is not callable"),
    ({"id": "sample_envs:hello"}, "env.id: sample_envs:hello returned str, not a PettingZoo environment: no possible_"),
    ({"id": "sample_envs:Turns", "kwargs": {"parallel": False}}, "env.id: sample_envs:Turns cannot be run in parallel"),
    ({"id": "sample_envs:Counter", "kwargs": {"size": 3}}, "env.kwargs.size: sample_envs:Counter has no such arg"),
    ({"id": "sample_envs:Counter", "kwargs": {"length": 0}}, "rejected {'length': 0} (assert length > 0)"),
    ({"id": SPREAD, "kwargs": {"M": 3}}, f"env.kwargs.M: {SPREAD} has no such argument; expected one of N"),
    ({"id": EMPTY, "kwargs": {"colour": 1}}, f"env.kwargs.colour: {EMPTY} has no such argument"),
    ({"id": EMPTY, "kwargs": {"agent": 2}}, f"env.kwargs.agent: {EMPTY} has no such argument; did you mean agents"),
    (
        {"id": "sample_envs.py:Counter"},
        "env.id: expected package.module:NAME, got a file: did you mean sample_envs:Co",
    ),
    ({"id": EMPTY, "kwargs": {"cost": 2}}, f"env.kwargs.cost: {EMPTY} has no such argument"),
    (
        {"id": "miniwob_elements", "kwargs": {"element": 2}},
        "element: miniwob_elements has no such argument; did you mean elements",
    ),
    (
        {"id": "miniwob_elements", "kwargs": {"task": 2}},
        "task: miniwob_elements has no such argument; did you mean tasks",
    ),
    ({"id": "webarena", "kwargs": {"max_step": 2}}, "max_step: webarena has no such argument; did you mean max_steps"),
    ({"id": "webarena", "kwargs": {"date": "a"}}, "env.kwargs.date: webarena has no such argument; did you mean data"),
    ({"id": EMPTY, "kwargs": {"agents": 0}}, "rejected {'agents': 0} (agents=0, expected a positive integer)"),
    ({"id": EMPTY, "kwargs": {"agents": 9}}, "(agents=9, a number that multigrid 0.1.0 fails on)"),
    ({"id": EMPTY, "kwargs": {"agent_view_size": 4}}, "rejected {'agent_view_size': 4} (assert view_size % 2 == 1)"),
    ({"id": EMPTY, "kwargs": {"success_termination_mode": "each"}}, "success_termination_mode='each', expected 'any'"),
    ({"id": EMPTY, "kwargs": {"render_mode": "ansi"}}, "render_mode='ansi', expected 'rgb_array' or 'human'"),
    ({"id": SPREAD, "cost": {"collision": 1}}, f"env.cost: only MultiGrid environments have priced costs; {SPREAD}"),
    ({"id": "sample_envs:Counter", "cost": {"action": 1}}, "env.cost: only MultiGrid environments"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_mistakes_are_one_line_and_name_the_key(config: dict[str, Any], message: str):
    with pytest.raises(MarlRayError) as caught:
        make_env(EnvConfig(**config))
    assert message in str(caught.value) and "\n" not in str(caught.value)


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


def test_import_is_light():
    code = "import marl_ray.envs.registry, sys; print({'torch', 'ray', 'multigrid', 'pygame', 'mpe2'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "set()", result.stderr


def test_an_environment_cannot_change_the_config_that_it_is_made_from():
    config = EnvConfig(id="sample_envs:Greedy", kwargs={"names": ["a", "b"]})
    assert [make_env(config).possible_agents for _ in range(2)] == [["b", "a"]] * 2
    assert config.kwargs == {"names": ["a", "b"]}


@pytest.mark.parametrize(
    ("value", "shape", "dtype", "reason"),
    [
        (0.5, [3], "float64", ": its dtype is float64, expected float32"),
        (0.5, [3, 1], "float32", ": its shape is (3, 1), expected (3,)"),
        (2, [3], "int8", ""),
    ],
)
def test_an_observation_outside_its_space_is_said_with_what_its_numbers_do_not_show(
    value: float, shape: list[int], dtype: str, reason: str
):
    settings = {"value": value, "shape": shape, "dtype": dtype}
    failures = {each.name: each.failure for each in check("sample_envs:Misfit", settings)}
    assert str(failures["observations"]).endswith(f"of a is not in Box(0.0, 1.0, (3,), float32){reason}")


def test_new_spaces_at_every_call_are_one_failure_and_not_a_seed_that_does_not_repeat():
    failures = [str(each) for each in check("sample_envs:NewSpaces", {}) if each.failure]
    assert len(failures) == 1 and "new space at every call, whose draws would repeat: expected the same" in failures[0]


def test_a_check_closes_every_environment_that_it_makes():
    import sample_envs

    assert [each.failure for each in check("sample_envs:Opened", {})] == [None] * 7
    assert first_fault(EnvConfig(id="sample_envs:Opened")) is None
    fault = first_fault(EnvConfig(id="sample_envs:Opened", kwargs={"stuck": True}))
    assert fault is not None and "it is stuck" in str(fault.failure)
    assert sample_envs.Opened.now == []


def test_a_run_is_warned_of_the_first_fault_of_its_environment_and_of_no_other_environment():
    fault = first_fault(EnvConfig(id="sample_envs:Misfit", kwargs={"value": 2, "shape": [3], "dtype": "int8"}))
    assert fault is not None and fault.name == "observations"
    assert first_fault(EnvConfig(id="toys.envs:countdown")) is None
    run = {"name": "mine", "algorithm": "ppo", "train": {"total_steps": 8}}
    warning = environment_warning(parse_config(RunConfig, run | {"env": {"id": "sample_envs:NewSpaces"}}))
    assert warning is not None and warning.startswith("warning: env.id sample_envs:NewSpaces: spaces: ")
    assert warning.endswith("; `marl-ray check environment sample_envs:NewSpaces` shows every fault")
    assert environment_warning(parse_config(RunConfig, run | {"env": {"id": EMPTY}})) is None
