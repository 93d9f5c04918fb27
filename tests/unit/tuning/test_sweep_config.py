"""Sweep files: spaces, conditions, and what is refused before a trial starts."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_ray.config import parse_config
from marl_ray.config.sweep import SweepConfig, combinations, load_sweep
from marl_ray.errors import MarlRayError
from marl_ray.tuning.search.spaces import SEARCHES, RandomSearch, Search, TpeSearch, Values, check_space, draw

RUN = {"env": {"id": "toys.envs:countdown"}, "train": {"env_copies": 8}}
LR = {"hyper.lr": {"grid": [0.1, 0.2]}}
GROUPS = {
    "algorithm": {"choice": ["ppo", "grpo", "rloo"]},
    "train.group_size": {"choice": [2, 4], "when": {"algorithm": ["grpo", "rloo"]}},
}


def sweep(space: Any = LR, **keys: Any) -> SweepConfig:
    return parse_config(SweepConfig, {"name": "s", "run": RUN, "space": space} | keys, source="file")


def test_a_grid_is_every_combination_with_conditional_keys_only_where_they_apply():
    grid = combinations(sweep(GROUPS | LR))
    assert len(grid) == 2 + 2 * 2 * 2
    assert all(("train.group_size" in point) == (point["algorithm"] != "ppo") for point in grid)


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
            {"scheduler": {"kind": "pbt", "interval": 5}, "space": {"hyper.optimizer": {"grid": ["adamw", "sgd"]}}},
            "space.hyper.optimizer: pbt hands its state from trial to trial, so all have one",
        ),
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
def test_a_sweep_that_makes_no_sense_is_refused_in_one_line(keys, message):
    with pytest.raises(MarlRayError) as error:
        sweep(**keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"hyper.lrr": {"grid": [1.0]}}, "sweep 's': unknown key 'hyper.lrr'"),
        ({"hyper.lr": {"grid": [0.1, "fast"]}}, "hyper.lr=fast: hyper.lr: "),
        ({"hyper.lr": {"grid": [0.1, -1]}}, "hyper.lr=-1: hyper.lr: "),
        ({"algorithm": {"grid": ["ppo", "grpo"]}}, "train.group_size=1: grpo of policy 'shared' needs 2 or more"),
        (LR | {"hyper.pid_kp": {"grid": [0.1]}}, "sweep 's': hyper.pid_kp: no algorithm of this sweep reads it"),
        ({"env.id.deep": {"grid": [1]}}, "'env.id.deep': env.id is a value, not a group of keys"),
    ],
)
def test_every_combination_of_a_grid_is_checked_against_the_run_config(space, message):
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
def test_a_draw_is_a_function_of_its_number_and_lies_in_the_space(number):
    config = sweep(
        GROUPS
        | {
            "hyper.lr": {"loguniform": [1e-4, 1e-2]},
            "hyper.entropy_coef": {"uniform": [0.9, 1.0]},
            "hyper.epochs": {"int": [1, 3]},
        },
        search="random",
        budget={"trials": 1},
    )
    values = draw(config, number)
    assert values == draw(config, number)
    assert 1e-4 <= values["hyper.lr"] <= 1e-2
    assert 0.9 <= values["hyper.entropy_coef"] <= 1.0
    assert values["hyper.epochs"] in (1, 2, 3)
    assert ("train.group_size" in values) == (values["algorithm"] != "ppo")


def proposed(search: Search, number: int) -> Values:
    """The values of this number, which the search must have."""
    values = search.propose(number)
    assert values is not None
    return values


def test_a_random_search_goes_through_its_grid_keys_with_each_draw():
    search = RandomSearch(
        sweep(LR | {"hyper.entropy_coef": {"uniform": [0, 1]}}, search="random", budget={"trials": 4})
    )
    draws = [proposed(search, number) for number in range(4)]
    assert [draw["hyper.lr"] for draw in draws] == [0.1, 0.2, 0.1, 0.2]
    assert draws[0]["hyper.entropy_coef"] == draws[1]["hyper.entropy_coef"] != draws[2]["hyper.entropy_coef"]


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_that_does_not_learn_can_be_asked_ahead(kind):
    space = {"hyper.entropy_coef": {"choice" if kind != "grid" else "grid": [0.1, 0.2, 0.3, 0.4]}}
    used, fresh = (SEARCHES[kind](sweep(space, search=kind, budget={"trials": 4})) for _ in range(2))
    for number in range(4):
        used.propose(number)
    again, once = ([search.propose(number) for number in range(4)] for search in (used, fresh))
    assert (again == once) or fresh.is_adaptive
    assert fresh.is_adaptive == (kind == "tpe")


def optimise(search: TpeSearch, first: int, last: int) -> list[float]:
    objectives = []
    for number in range(first, last):
        values = search.propose(number)
        assert values is not None
        objectives.append(-abs(values["hyper.entropy_coef"] - 0.3) - (values["algorithm"] != "rloo"))
        search.tell(number, values, [objectives[-1]])
    return objectives


TPE = {
    "space": GROUPS | {"hyper.entropy_coef": {"uniform": [0, 1]}},
    "search": {"kind": "tpe", "seed": 1, "startup": 8},
    "budget": {"trials": 40},
}


def test_the_estimator_finds_the_better_half():
    uninterrupted = optimise(TpeSearch(sweep(**TPE)), 0, 40)
    assert sum(uninterrupted[20:]) > sum(uninterrupted[:20])


@pytest.mark.parametrize("count", [3, 30])
def test_an_estimator_that_is_taken_up_proposes_what_it_would_have_proposed(count):
    """Also of trials that have no result yet, or failed, and whose results come later."""
    unbroken, again = TpeSearch(sweep(**TPE)), TpeSearch(sweep(**TPE))
    configurations = [proposed(unbroken, 0)]
    for number in range(count):
        if number % 10 != 2:
            score = None if number % 10 == 4 else [-abs(configurations[number]["hyper.entropy_coef"] - 0.3)]
            unbroken.tell(number, configurations[number], score)
            again.tell(number, configurations[number], score)
        else:
            again.take_up(number, configurations[number])
        configurations.append(proposed(unbroken, number + 1))
    assert proposed(again, count) == configurations[count]
    for search in (unbroken, again):
        search.tell(2, configurations[2], [0.5])
    assert proposed(again, count + 1) == proposed(unbroken, count + 1)
    assert len({values["hyper.entropy_coef"] for values in configurations}) == count + 1


def test_several_metrics_are_searched_together():
    keys = TPE | {"metric": [{"name": "return"}, {"name": "episode_cost", "mode": "min"}]}
    search = TpeSearch(sweep(**keys))
    for number in range(12):
        values = proposed(search, number)
        search.tell(
            number, values, None if number % 4 == 0 else [values["hyper.entropy_coef"], -values["hyper.entropy_coef"]]
        )
    assert len(search.study.best_trials) > 1


def test_a_file_names_its_run_by_a_path_beside_it_and_overrides_reach_into_it(tmp_path):
    (tmp_path / "run.yaml").write_text("name: x\nenv: {id: toys.envs:countdown}\n")
    (tmp_path / "s.yaml").write_text("name: s\nrun: run.yaml\nseeds: 2\nspace: {hyper.lr: {grid: [1.0e-3]}}\n")
    config = load_sweep(tmp_path / "s.yaml", ["run.hyper.gamma=0.5", "budget.trials=7"])
    assert config.seeds == (0, 1)
    assert config.budget.trials == 7
    run = config.run_config({"hyper.lr": 0.5}, "n", 3)
    assert (run.hyper.gamma, run.hyper.lr, run.seed, run.name) == (0.5, 0.5, 3, "n")
    (tmp_path / "s.yaml").write_text("name: s\nrun: none.yaml\n")
    with pytest.raises(MarlRayError, match=r"none\.yaml"):
        load_sweep(tmp_path / "s.yaml")


def test_an_override_names_another_file_of_the_run_by_its_path_from_here(tmp_path, monkeypatch):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "other.yaml").write_text("name: x\nenv: {id: toys.envs:countdown}\n")
    (tmp_path / "sweeps/s.yaml").write_text("name: s\nrun: none.yaml\nspace: {hyper.lr: {grid: [1.0e-3]}}\n")
    monkeypatch.chdir(tmp_path)
    config = load_sweep("sweeps/s.yaml", ["run.hyper.gamma=0.5", "run=other.yaml"])
    assert config.run_config({}, "n", 3).hyper.gamma == 0.5
    with pytest.raises(
        MarlRayError, match=r"^run: config file 'missing.yaml' cannot be read: No such file or directory$"
    ):
        load_sweep("sweeps/s.yaml", ["run=missing.yaml"])


MIXED = {
    "algorithm": {"grid": ["mappo", "pid_lagrangian", "grpo"]},
    "hyper.pid_kp": {"grid": [0.1, 0.2]},
    "hyper.lr": {"grid": [0.1]},
    "train.group_size": {"grid": [4], "when": {"algorithm": ["grpo"]}},
}
COSTLY = RUN | {"constraints": [{"budget": 3}], "hyper": {"multiplier_init": 0.5, "gae_lambda": 0.9}}


def test_a_hyper_parameter_goes_only_to_the_algorithms_that_read_it():
    config = sweep(MIXED, run=COSTLY, set={"hyper.cost_gamma": 0.9, "team.shared.hyper": {"pid_kd": 0.5}})
    check_space(config)
    grid = combinations(config)
    assert [(point["algorithm"], point.get("hyper.pid_kp")) for point in grid] == [
        ("mappo", None),
        ("pid_lagrangian", 0.1),
        ("pid_lagrangian", 0.2),
        ("grpo", None),
    ]
    runs = [config.run_config(point, "n", 0) for point in grid]
    assert [set(run.hyper.model_dump(exclude_unset=True)) for run in runs] == [
        {"lr", "gae_lambda"},
        {"lr", "gae_lambda", "multiplier_init", "cost_gamma", "pid_kp"},
        {"lr", "gae_lambda", "multiplier_init", "cost_gamma", "pid_kp"},
        {"lr"},
    ]
    assert [run.team["shared"].hyper for run in runs] == [{}, {"pid_kd": 0.5}, {"pid_kd": 0.5}, {}]
    assert config.unread(grid[1]) == []
    assert set(config.unread(grid[0])) == {
        "hyper.multiplier_init",
        "hyper.cost_gamma",
        "hyper.pid_kp",
        "team.shared.hyper.pid_kd",
    }


def test_a_hyper_parameter_of_a_mixed_team_is_kept_where_one_policy_reads_it():
    team = {"a": {"agents": ["a"], "algorithm": "pid_lagrangian"}, "b": {"agents": ["b"]}}
    space = {"team.b.algorithm": {"grid": ["mappo", "ppo_lagrangian"]}, "team.b.hyper.multiplier_lr": {"grid": [0.1]}}
    config = sweep(space, run=COSTLY | {"team": team, "hyper": {"pid_ki": 0.3}})
    check_space(config)
    assert combinations(config) == [
        {"team.b.algorithm": "mappo"},
        {"team.b.algorithm": "ppo_lagrangian", "team.b.hyper.multiplier_lr": 0.1},
    ]
    assert all(config.run_config(point, "n", 0).hyper.pid_ki == 0.3 for point in combinations(config))


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_searches_ask_for_a_hyper_parameter_only_where_it_is_read(kind):
    space = MIXED | {"algorithm": {"choice": ["mappo", "pid_lagrangian"]}, "hyper.pid_kp": {"uniform": [0.1, 0.2]}}
    space |= {"hyper.lr": {"loguniform": [0.1, 0.2]}, "train.group_size": {"choice": [4]}}
    config = sweep(space, run=COSTLY, search={"kind": kind, "startup": 5}, budget={"trials": 20})
    check_space(config)
    search = {"random": RandomSearch, "tpe": TpeSearch}[kind](config)
    draws = [search.propose(number) for number in range(20)]
    assert {draw["algorithm"] for draw in draws if draw} == {"mappo", "pid_lagrangian"}
    assert all(
        trial is not None and ("hyper.pid_kp" in trial) == (trial["algorithm"] == "pid_lagrangian") for trial in draws
    )


NESTED = st.sampled_from(
    [
        {},
        {"train": {"env_copies": 8, "total_steps": 50}},
        {"train": {"env_copies": 8}, "env.kwargs": {"start": {"a": [1, 2]}}},
        {"hyper": {"lr": 0.5, "pid_kp": 0.3}, "team": {"shared": {"hyper": {"clip": 0.1}}}},
    ]
)
DIMENSIONS = {
    "algorithm": {"grid": ["mappo", "pid_lagrangian", "p3o"]},
    "train.group_size": {"grid": [2, 4], "when": {"train.env_copies": [8]}},
    "env.kwargs": {"grid": [{"start": {"a": [3]}}, {"start": {"a": [4, 5]}}]},
    "env.kwargs.start.b": {"grid": [[6], [7]]},
    "hyper.pid_kp": {"grid": [0.1, 0.2]},
    "team.shared.hyper.lr": {"grid": [0.1, 0.2]},
}


@settings(max_examples=25)
@given(NESTED, st.sets(st.sampled_from(sorted(DIMENSIONS)), min_size=1, max_size=3), st.randoms())
def test_making_the_config_of_a_trial_is_pure(fixed, keys, random):
    """The sweep's config stays as it is, and a trial's config depends neither on other trials nor on their order."""
    space = {key: DIMENSIONS[key] for key in sorted(keys)}
    config = sweep(space, run=COSTLY, set=fixed)
    before = config.model_dump_json()
    grid = combinations(config)
    unchanged = copy.deepcopy(grid)

    def run(values: dict[str, Any]) -> dict[str, Any]:
        fresh = sweep(space, run=COSTLY, set=fixed)
        alone, together = fresh.run_config(copy.deepcopy(values), "n", 0), config.run_config(values, "n", 0)
        assert alone == together == config.run_config(values, "n", 0)
        assert alone.as_given() == together.as_given()
        return together.as_given()

    first = [run(values) for values in grid]
    order = list(range(len(grid)))
    random.shuffle(order)
    for number in order:
        assert run(grid[number]) == first[number]
    assert grid == unchanged
    assert config.model_dump_json() == before


def test_the_shipped_sweep_of_algorithms_gives_groups_only_to_those_that_compare_them():
    config = load_sweep(Path(__file__).parents[3] / "jobs" / "configs" / "sweeps" / "algorithms.yaml")
    sizes = {}
    for _ in range(2):
        for values in combinations(config):
            sizes[values["algorithm"]] = config.run_config(values, "n", 0).train.group_size
    assert {name for name, size in sizes.items() if size == 8} == {
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp_baseline",
        "dapo",
    }
    assert {size for name, size in sizes.items() if name in ("ippo", "mappo", "reinforce_pp")} == {1}


def test_trials_begin_anew():
    run = {"name": "r", "env": {"id": "budget_dag"}, "resume_from": "other"}
    keys = {"name": "s", "run": run, "space": {"hyper.lr": {"grid": [1.0e-4]}}, "seeds": 1}
    with pytest.raises(
        MarlRayError, match=r"^run.resume_from: every trial of a sweep begins anew; expected a run without"
    ):
        check_space(parse_config(SweepConfig, keys))
