"""Sweep files: spaces, conditions, and what is refused before a trial starts."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig, combinations, load_sweep
from marl_ray.errors import MarlRayError
from marl_ray.tuning.spaces import RandomSearch, TpeSearch, check_space, draw

RUN = {"env": {"id": "toy_envs:countdown"}, "train": {"env_copies": 8}}
LR = {"hyper.lr": {"grid": [0.1, 0.2]}}
GROUPS = {
    "algorithm": {"choice": ["ppo", "grpo", "rloo"]},
    "train.group_size": {"choice": [2, 4], "when": {"algorithm": ["grpo", "rloo"]}},
}


def sweep(space: Any = LR, **keys: Any) -> SweepConfig:
    return parse_config(SweepConfig, {"name": "s", "run": RUN, "space": space} | keys, source="file")


def test_a_grid_is_every_combination_with_conditional_keys_only_where_they_apply():
    found = combinations(sweep(GROUPS | LR))
    assert len(found) == 2 + 2 * 2 * 2
    assert all(("train.group_size" in one) == (one["algorithm"] != "ppo") for one in found)


def test_a_condition_may_look_at_a_key_that_does_not_vary():
    space = {"train.group_size": {"grid": [2, 4], "when": {"algorithm": ["grpo"]}}} | LR
    assert len(combinations(sweep(space))) == 2
    assert len(combinations(sweep(space, set={"algorithm": "grpo"}))) == 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"space": {}}, "space: "),
        ({"space": {"hyper.lr": {"grid": []}}}, "grid: expected at least one value, got none"),
        ({"space": {"hyper.lr": {}}}, "expected one of grid, choice, uniform, loguniform, int, got none"),
        ({"space": {"hyper.lr": {"grid": [1], "choice": [2]}}}, "got grid, choice"),
        ({"space": {"hyper.lr": {"uniform": [2, 1]}}, "search": "random"}, "uniform: expected low < high"),
        ({"space": {"hyper.lr": {"uniform": [1, 2]}}}, "space.hyper.lr: a grid search needs `grid` or `choice`"),
        ({"space": {"seed": {"grid": [1]}}}, "'seed' is set by the sweep itself: use `seeds`"),
        ({"space": {"storage": {"grid": ["x"]}}}, "'storage' is set by the sweep itself"),
        ({"search": "random"}, "budget: search: random never ends by itself; give trials, hours or steps"),
        ({"search": "tpe", "budget": {"trials": 2}}, "space.hyper.lr: `grid` is gone through, not searched"),
        ({"metric": [{"name": "return"}, {"name": "kl"}]}, "metric: several metrics need search: tpe"),
        (
            {"scheduler": {"kind": "pbt", "interval": 5}, "space": GROUPS},
            "only hyper-parameters that all have may vary",
        ),
        ({"scheduler": {"kind": "pb2", "interval": 5}}, "space.hyper.lr: pb2 searches numbers"),
        ({"scheduler": {"kind": "asah"}}, "scheduler"),
        ({"seeds": [1, 1]}, "seeds: each may be given once"),
        ({"sedes": 3}, "unknown key 'sedes'"),
        (
            {"space": {"a": {"grid": [1], "when": {"b": [1]}}, "b": {"grid": [1], "when": {"a": [1]}}}},
            "space: the `when` of a, b go in a circle",
        ),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused_in_one_line(keys: dict[str, Any], message: str):
    with pytest.raises(MarlRayError) as error:
        sweep(**keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"hyper.lrr": {"grid": [1.0]}}, "hyper.lrr=1.0: unknown key 'hyper.lrr'"),
        ({"hyper.lr": {"grid": [0.1, "fast"]}}, "hyper.lr=fast: hyper.lr: "),
        ({"hyper.lr": {"grid": [0.1, -1]}}, "hyper.lr=-1: hyper.lr: "),
        ({"algorithm": {"grid": ["ppo", "grpo"]}}, "train.group_size=1: grpo of policy 'shared' needs 2 or more"),
        ({"env.id.deep": {"grid": [1]}}, "'env.id.deep': env.id is a value, not a group of keys"),
    ],
)
def test_every_combination_of_a_grid_is_checked_against_the_run_config(space: Any, message: str):
    with pytest.raises(MarlRayError) as error:
        check_space(sweep(space))
    assert message in str(error.value)


def test_ranges_are_checked_at_both_ends_and_choices_at_every_value():
    budget = {"search": "random", "budget": {"trials": 1}}
    with pytest.raises(MarlRayError, match=r"hyper.gamma=1.5: hyper.gamma"):
        check_space(sweep({"hyper.gamma": {"uniform": [0.9, 1.5]}}, **budget))
    deep = {"train.group_size": {"choice": [2, 3], "when": {"algorithm": ["rloo"]}}, "algorithm": GROUPS["algorithm"]}
    with pytest.raises(MarlRayError, match=r"train.group_size=3 must divide"):
        check_space(sweep(deep | {"algorithm": {"choice": ["ppo", "rloo"]}}, **budget))
    check_space(sweep(GROUPS, **budget))


@given(st.integers(0, 10_000))
def test_a_draw_is_a_function_of_its_number_and_lies_in_the_space(number: int):
    config = sweep(
        GROUPS
        | {
            "hyper.lr": {"loguniform": [1e-4, 1e-2]},
            "hyper.gamma": {"uniform": [0.9, 1.0]},
            "hyper.epochs": {"int": [1, 3]},
        },
        search="random",
        budget={"trials": 1},
    )
    values = draw(config, number)
    assert values == draw(config, number)
    assert 1e-4 <= values["hyper.lr"] <= 1e-2
    assert 0.9 <= values["hyper.gamma"] <= 1.0
    assert values["hyper.epochs"] in (1, 2, 3)
    assert ("train.group_size" in values) == (values["algorithm"] != "ppo")


def test_a_random_search_goes_through_its_grid_keys_with_each_draw():
    search = RandomSearch(sweep(LR | {"hyper.gamma": {"uniform": [0, 1]}}, search="random", budget={"trials": 4}))
    found = [search.ask(number) for number in range(4)]
    assert [one["hyper.lr"] for one in found] == [0.1, 0.2, 0.1, 0.2]
    assert found[0]["hyper.gamma"] == found[1]["hyper.gamma"] != found[2]["hyper.gamma"]


def optimise(search: TpeSearch, first: int, last: int) -> list[float]:
    found = []
    for number in range(first, last):
        values = search.ask(number)
        assert values is not None
        found.append(-abs(values["hyper.gamma"] - 0.3) - (values["algorithm"] != "rloo"))
        search.tell(number, values, [found[-1]])
    return found


TPE = {
    "space": GROUPS | {"hyper.gamma": {"uniform": [0, 1]}},
    "search": {"kind": "tpe", "seed": 1, "startup": 8},
    "budget": {"trials": 40},
}


def test_the_estimator_finds_the_better_half_and_can_be_taken_up_again():
    found = optimise(TpeSearch(sweep(**TPE)), 0, 40)
    assert sum(found[20:]) > sum(found[:20])
    # A new process is told what is known, also of trials that it has not asked for.
    again = TpeSearch(sweep(**TPE))
    whole = TpeSearch(sweep(**TPE))
    for number in range(30):
        values = whole.ask(number)
        assert values is not None
        again.tell(number, values, [-abs(values["hyper.gamma"] - 0.3)])
    values = again.ask(30)
    assert values is not None and 0 <= values["hyper.gamma"] <= 1
    assert len(again.study.trials) == 31


def test_several_metrics_are_searched_together():
    keys = TPE | {"metric": [{"name": "return"}, {"name": "episode_cost", "mode": "min"}]}
    search = TpeSearch(sweep(**keys))
    for number in range(12):
        values = search.ask(number)
        search.tell(number, values, None if number % 4 == 0 else [values["hyper.gamma"], -values["hyper.gamma"]])
    assert len(search.study.best_trials) > 1


def test_a_file_names_its_run_by_a_path_beside_it_and_overrides_reach_into_it(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("name: x\nenv: {id: toy_envs:countdown}\n")
    (tmp_path / "s.yaml").write_text("name: s\nrun: run.yaml\nseeds: 2\nspace: {hyper.lr: {grid: [1.0e-3]}}\n")
    config = load_sweep(tmp_path / "s.yaml", ["run.hyper.gamma=0.5", "budget.trials=7"])
    assert config.seeds == (0, 1)
    assert config.budget.trials == 7
    run = config.run_config({"hyper.lr": 0.5}, "n", 3)
    assert (run.hyper.gamma, run.hyper.lr, run.seed, run.name) == (0.5, 0.5, 3, "n")
    with pytest.raises(MarlRayError, match=r"none\.yaml"):
        (tmp_path / "s.yaml").write_text("name: s\nrun: none.yaml\n")
        load_sweep(tmp_path / "s.yaml")
