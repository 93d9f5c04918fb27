"""Environments: everything that `make_env` accepts and refuses, and how a user's are checked."""

import subprocess
import sys
from typing import Any

import pytest
from multigrid.envs import CONFIGURATIONS

from marl_ray.api.training import environment_warning
from marl_ray.config import EnvConfig, RunConfig, parse_config
from marl_ray.conformance.extensions.environment import check, first_fault
from marl_ray.envs.copies import warm_up
from marl_ray.envs.gridworld.environment import IDS
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError

SPREAD = "mpe2.simple_spread_v3"
EMPTY = "MultiGrid-Empty-5x5-v0"


def build(env_id: str, cost: dict[str, float] | None = None, **kwargs: Any) -> Any:
    return make_env(EnvConfig(id=env_id, kwargs=kwargs, cost=cost or {}))


def test_ids_are_the_packages():
    assert len(IDS) == 13 and set(IDS) == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", ["Counter", "Turns"])
def test_environments_of_users_play_to_their_end(name):
    env = build(f"sample_envs:{name}", length=2)
    observations, _ = env.reset(seed=0)
    assert observations == {"a": 0, "b": 0}
    env.step({"a": 0, "b": 1})
    observations, _, _, truncated, _ = env.step({"a": 0, "b": 1})
    assert observations == {"a": 2, "b": 2} and truncated == {"a": True, "b": True} and not env.agents


def test_a_warm_up_resets_steps_once_and_closes():
    import sample_envs

    sample_envs.Recorded.calls.clear()
    warm_up(EnvConfig(id="sample_envs:Recorded"))
    assert sample_envs.Recorded.calls == ["reset", "step", "close"]


def test_a_warm_up_refuses_a_reward_that_is_not_finite():
    with pytest.raises(
        MarlRayError, match=r"^env\.id: sample_envs:Unpaid gives a a reward of nan, expected a finite number$"
    ):
        warm_up(EnvConfig(id="sample_envs:Unpaid"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"id": "nothing"}, "env.id: 'nothing' is unknown; expected one of budget_dag, code_team"),
    ({"id": "CartPole-v1"}, "env.id: 'CartPole-v1' is unknown; did you mean gymnasium.CartPole-v1?"),
    ({"id": "gym.CartPole-v1"}, "env.id: 'gym.CartPole-v1' is unknown; did you mean gymnasium.CartPole-v1?"),
    ({"id": "simple_spread_v3"}, "env.id: 'simple_spread_v3' is unknown; did you mean mpe2.simple_spread_v3?"),
    ({"id": "MultiGird-Empty-8x8-v0"}, "env.id: 'MultiGird-Empty-8x8-v0' is unknown; did you mean MultiGrid-Empty-8x8"),
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
    (
        {"id": EMPTY, "kwargs": {"width": 6}},
        f"env.kwargs.width: {EMPTY} has no such argument; its size or room_size sets it",
    ),
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
    (
        {"id": "webarena", "kwargs": {"max-steps": 2}},
        "max-steps: webarena has no such argument; did you mean max_steps",
    ),
    ({"id": EMPTY, "kwargs": {"a size": 2}}, f"env.kwargs.a size: {EMPTY} has no such argument; "),
    ({"id": "webarena", "kwargs": {"date": "a"}}, "env.kwargs.date: webarena has no such argument; did you mean data"),
    ({"id": EMPTY, "kwargs": {"agents": 0}}, "rejected {'agents': 0} (agents=0, expected a positive integer)"),
    ({"id": EMPTY, "kwargs": {"agents": True}}, "rejected {'agents': True} (agents=True, expected a positive integer)"),
    ({"id": EMPTY, "kwargs": {"max_steps": True}}, "rejected {'max_steps': True} (max_steps=True, expected a number)"),
    ({"id": EMPTY, "kwargs": {"size": True}}, "rejected {'size': True} (size=True, expected a number)"),
    ({"id": "budget_dag", "kwargs": {"budget": True}}, "rejected {'budget': True} (budget=True, expected a number)"),
    ({"id": "budget_dag", "kwargs": {"workers": True}}, "rejected {'workers': True} (workers=True, expected a number)"),
    ({"id": "math", "kwargs": {"levels": [1, True]}}, "(levels=[1, True], expected no true or false in it)"),
    ({"id": "math", "kwargs": {"levels": [1, 1.5]}}, "(levels=[1, 1.5], expected whole numbers in it)"),
    ({"id": "code_team", "kwargs": {"turns": 1.5}}, "rejected {'turns': 1.5} (turns=1.5, expected a whole number)"),
    ({"id": "react", "kwargs": {"observation_limit": 60.5}}, "(observation_limit=60.5, expected a whole number)"),
    ({"id": "webarena", "kwargs": {"max_steps": True}}, "(max_steps=True, expected a number)"),
    ({"id": "webarena", "kwargs": {"max_steps": "many"}}, "(max_steps='many', expected a whole number)"),
    ({"id": "webarena", "kwargs": {"observation_limit": 9.5}}, "(observation_limit=9.5, expected a whole number)"),
    (
        {"id": "webarena", "kwargs": {"step_s": "1 min"}},
        "(step_s='1 min', expected seconds, more than 0 and less than a day (86,400))",
    ),
    ({"id": "webarena", "kwargs": {"seed": None}}, "(seed=None, expected a whole number)"),
    ({"id": "miniwob_elements", "kwargs": {"variants": True}}, "(variants=True, expected a number)"),
    ({"id": EMPTY, "kwargs": {"agents": 9}}, "(agents=9, a number that multigrid 0.1.0 fails on)"),
    ({"id": EMPTY, "kwargs": {"agent_view_size": 4}}, "rejected {'agent_view_size': 4} (assert view_size % 2 == 1)"),
    ({"id": EMPTY, "kwargs": {"success_termination_mode": "each"}}, "success_termination_mode='each', expected 'any'"),
    ({"id": EMPTY, "kwargs": {"render_mode": "ansi"}}, "render_mode='ansi', expected 'rgb_array' or 'human'"),
    ({"id": SPREAD, "cost": {"collision": 1}}, f"env.cost: only MultiGrid environments have priced costs; {SPREAD}"),
    ({"id": "sample_envs:Counter", "cost": {"action": 1}}, "env.cost: only MultiGrid environments"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_mistakes_are_one_line_and_name_the_key(config, message):
    with pytest.raises(MarlRayError) as caught:
        make_env(EnvConfig(**config))
    assert message in str(caught.value) and "\n" not in str(caught.value)


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
def test_an_observation_outside_its_space_is_said_with_what_its_numbers_do_not_show(value, shape, dtype, reason):
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
    assert warning.endswith("; `marl-ray check plugin environment sample_envs:NewSpaces` shows every fault")
    assert environment_warning(parse_config(RunConfig, run | {"env": {"id": EMPTY}})) is None
