"""Every config in jobs/ is one that can be read, and says what was never run."""

from pathlib import Path

import pytest

from marl_ray.config import EnvConfig, RunConfig, load_config
from marl_ray.config.sweep import combinations, load_sweep
from marl_ray.envs.registry import make_env
from marl_ray.tuning.search.spaces import check_space

JOBS = Path(__file__).parents[3] / "jobs" / "configs"
CONFIGS, SWEEPS = sorted(JOBS.glob("*.yaml")), sorted(JOBS.glob("sweeps/*.yaml"))
WEBARENA = {"webarena_standard.yaml": 298, "webarena_full.yaml": 812}
"""Configs for WebArena's own sites, and the tasks that need no others."""
RECIPES = ["qwen.yaml", "qwen_coder_team.yaml", "qwen_react.yaml"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_run_config_of_jobs_can_be_read(path):
    load_config(RunConfig, path)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_a_sweep_config_of_jobs_can_be_read(path):
    check_space(load_sweep(path))


def test_recipes_for_large_models_say_that_they_were_never_run():
    named = {path.name: path.read_text() for path in (*CONFIGS, *SWEEPS) if "qwen" in path.name}
    assert sorted(named) == RECIPES
    assert all("Never run on these weights here" in text for text in named.values())
    runs = [load_config(RunConfig, path) for path in CONFIGS if path.name in RECIPES]
    for run in runs:
        assert {policy.generation.engine for policy in run.team.values()} == {"vllm"} and run.evaluation.benchmarks
    sweep = load_sweep(JOBS / "sweeps" / "qwen.yaml")
    variants = [sweep.run_config(values, "trial", 0) for values in combinations(sweep)]
    assert [variant.algorithm for variant in variants] == ["grpo", "rloo", "dapo"]
    assert [variant.hyper_of("solver").overlong_buffer for variant in variants] == [0, 0, 128]


@pytest.mark.parametrize(("name", "tasks"), WEBARENA.items())
def test_a_config_for_the_sites_of_webarena_plays_its_tasks(name, tasks, tmp_path):
    path = CONFIGS[0].with_name(name)
    assert "Never run on these weights here" in path.read_text()
    run = load_config(RunConfig, path)
    data = Path(__file__).parents[2] / "fixtures/webarena/test.raw.json.gz"
    env = make_env(EnvConfig(id=run.env.id, kwargs={**run.env.kwargs, "data": str(data), "login": str(tmp_path)}))
    assert env.tasks + env.held_out == tasks
    assert env.held_out >= run.evaluation.tasks // 2
    assert {policy.generation.engine for policy in run.team.values()} == {"vllm"}
