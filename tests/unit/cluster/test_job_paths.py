"""Every key and option that names a file or a folder is refused where its path is relative to the job's folder."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from marl_ray.cluster.job_paths import PATH_KEYS, PATH_OPTIONS, refuse_relative_paths
from marl_ray.config import RunConfig, parse_config
from marl_ray.config.reference import key_rows
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENVIRONMENT, REWARD, TOOL

AC = {"name": "x", "env": {"id": "MultiGrid-Empty-5x5-v0"}, "storage": "/runs"}
LM = {
    "name": "x",
    "algorithm": "grpo",
    "env": {"id": "math"},
    "team": {"solver": {"agents": ["solver"], "model": {"path": "Qwen/Qwen2.5-3B-Instruct"}}},
    "train": {"env_copies": 4, "group_size": 4, "horizon": 1},
    "storage": "/runs",
}
SEARCH = "env.kwargs.tools.google_search_serper"
JUDGE = "env.kwargs.reward.llm_judge"
RELATIVE = [
    (AC, "storage", "runs"),
    (AC, "tracking.uri", "sqlite:///mlflow.db"),
    (AC, "tracking.uri", "file:mlruns"),
    (AC, "team.shared.bundle", "bundles/a"),
    (AC, "warm_start.data", "exported/decisions.parquet"),
    (AC, "resume_from", "runs/first"),
    (LM, "team.solver.model.path", "./model"),
    (LM, "team.solver.model.path", "models/qwen/3b"),
    (LM, "data", "pairs.jsonl"),
    (LM, "data", "decisions://exported/math"),
    (LM, "warm_start.data", "lines.jsonl"),
    (LM, "evaluation.benchmarks.0.data", "data/math.jsonl"),
    (LM, "env.kwargs.data", "data/math.jsonl"),
    (LM, "env.kwargs.test_data", "data/math.jsonl"),
    (LM, "env.kwargs.login", "cookies"),
    (LM, "env.kwargs.record", "recorded"),
    (LM, f"{JUDGE}.cache", "replies.db"),
    (LM, f"{SEARCH}.cache", "search.db"),
    (LM, f"{SEARCH}.corpus", "pages.jsonl"),
    (LM, f"{SEARCH}.key_file", "serper.key"),
]
ELSEWHERE = [
    (AC, "tracking.uri", "databricks://profile"),
    (AC, "tracking.uri", "sqlite:////data/mlflow.db"),
    (AC, "team.shared.bundle", "models:/team/3"),
    (AC, "resume_from", "first"),
    (AC, "resume_from", "s3://bucket/runs/first"),
    (LM, "team.solver.model.path", "/models/qwen"),
    (LM, "team.solver.model.path", "models:/qwen/1"),
    (LM, "data", "decisions:///exported/math"),
    (LM, "data", "decisions://s3://bucket/math"),
    (LM, "warm_start.data", "environment"),
    (LM, "evaluation.benchmarks.0.data", "s3://bucket/math.jsonl"),
    (LM, "env.kwargs.data", "/data/math.jsonl"),
    (LM, f"{SEARCH}.corpus", "towns"),
    (LM, f"{JUDGE}.url", "https://judge.example/v1"),
]


def config_with(base: dict[str, object], key: str, value: str) -> RunConfig:
    overrides = [f"{key}={value}"]
    if key == "data":
        overrides += ["algorithm=dpo", "train.group_size=1"]
    if key.startswith("evaluation.benchmarks"):
        overrides = [f"evaluation.benchmarks=[{{name: math, data: '{value}'}}]"]
    return parse_config(RunConfig, base, overrides)


@pytest.mark.parametrize(("base", "key", "value"), RELATIVE)
def test_a_relative_path_is_refused_by_the_name_of_its_key(base, key, value):
    with pytest.raises(MarlRayError) as refused:
        refuse_relative_paths(config_with(base, key, value))
    assert str(refused.value) == (
        f"{key}={value!r} is relative to the job's temporary folder; give an absolute path or a URI, "
        f"such as {key}=s3://bucket/folder"
    )


@pytest.mark.parametrize(("base", "key", "value"), ELSEWHERE)
def test_what_every_machine_reaches_passes(base, key, value):
    refuse_relative_paths(config_with(base, key, value))


def keys_of_files(kind: str) -> set[str]:
    """The keys of a config that are described as a file or a folder, in whatever form."""
    return {row.key for row in key_rows(kind) if re.search(r"\b(files?|folders?|URI|JSONL)\b", row.description)}


def test_no_key_of_a_run_is_forgotten():
    no_paths = {"evaluation.benchmarks[].sha256", "evaluation.benchmarks[].problems"}
    keys = keys_of_files("run") - no_paths
    assert {key.replace("[]", ".*").replace("NAME", "*") for key in keys} == set(PATH_KEYS)
    refused = {key for _, key, _ in RELATIVE if "kwargs" not in key}
    assert {re.sub(r"\.(shared|solver|0)\.", ".*.", key) for key in refused} == set(PATH_KEYS)
    assert keys_of_files("sweep") == {"run", "storage"}  # `run` is read here, and every trial has the sweep's storage


def files_of_parts() -> Iterator[str]:
    """The options that the sources of built-in environments, rewards and tools describe as a file or a folder."""
    references = [*ENVIRONMENT.builtins.values(), *REWARD.builtins.values(), *TOOL.builtins.values()]
    for module in {reference.partition(":")[0] for reference in references} | {"marl_ray.envs.web.options"}:
        text = Path(str(import_module(module).__file__)).read_text()
        yield from re.findall(r"^ +(\w+): (?:the|an?) (?:\w+ )?(?:file|folder)\b", text, re.MULTILINE)
        yield from re.findall(r'^ +(\w+): str \| None = None\n +"""The (?:file|folder)\b', text, re.MULTILINE)


def test_no_option_of_a_built_in_part_is_forgotten():
    assert set(files_of_parts()) == set(PATH_OPTIONS)
    assert {key.rpartition(".")[2] for _, key, _ in RELATIVE if "kwargs" in key} == set(PATH_OPTIONS)


def test_a_users_own_option_is_refused_if_its_path_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps/one.txt").touch()
    user_env = AC | {"env": {"id": "toys.envs:countdown", "kwargs": {"data": "small", "maps": ["maps/one.txt"]}}}
    with pytest.raises(MarlRayError, match=r"^env\.kwargs\.maps\.0='maps/one\.txt' is relative"):
        refuse_relative_paths(parse_config(RunConfig, user_env))
    (tmp_path / "maps/one.txt").unlink()
    refuse_relative_paths(parse_config(RunConfig, user_env))


def test_a_folder_that_is_here_is_no_name_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuse_relative_paths(parse_config(RunConfig, LM))
    (tmp_path / "Qwen/Qwen2.5-3B-Instruct").mkdir(parents=True)
    with pytest.raises(MarlRayError, match=r"^team\.solver\.model\.path='Qwen/Qwen2\.5-3B-Instruct' is relative"):
        refuse_relative_paths(parse_config(RunConfig, LM))


def test_every_value_of_a_sweeps_space_is_looked_at():
    space = {"team.shared.bundle": {"grid": ["/bundles/a", "bundles/b"]}}
    sweep = parse_config(SweepConfig, {"name": "s", "run": AC, "space": space, "storage": "/sweeps"})
    with pytest.raises(MarlRayError, match=r"^team\.shared\.bundle='bundles/b' is relative"):
        refuse_relative_paths(sweep)
