"""Files and folders that a job's config names: relative ones are refused, because a job runs in a folder of its own."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from marl_ray.config import RunConfig
from marl_ray.config.run.keys import DECISIONS_SCHEME
from marl_ray.config.sweep import SweepConfig, extreme_combinations
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENVIRONMENT, REWARD, TOOL
from marl_ray.json_types import JsonValue

MODEL_PATH = "team.*.model.path"
PATH_KEYS: Mapping[str, str] = {
    "storage": "",
    "tracking.uri": r"(databricks|databricks-uc|uc)(:.*)?",
    "team.*.bundle": "",
    MODEL_PATH: r"[A-Za-z0-9][-\w.]*(/[-\w.]+)?",
    "data": "",
    "warm_start.data": "environment",
    "resume_from": r"[^/]+|~.*",
    "evaluation.benchmarks.*.data": "",
}
"""Keys of a run that name a file or a folder -> pattern of the texts that are names or words instead.

`*` stands for any name, and for the number of an entry of a list.
"""
PATH_OPTIONS: Mapping[str, str] = {
    "cache": "",
    "corpus": "towns",
    "data": "",
    "key_file": "",
    "login": "",
    "record": "",
    "test_data": "",
}
"""The same of the options of built-in environments, rewards and tools."""
_BUILTINS = {*ENVIRONMENT.builtins, *REWARD.builtins, *TOOL.builtins}
_SCHEME = re.compile(rf"{DECISIONS_SCHEME}|sqlite:///|file:(?!//)")
"""Beginning of a URI behind which a relative path may stand."""


def refuse_relative_paths(config: RunConfig | SweepConfig) -> None:
    """Raise MarlRayError for a relative path in the config of a job, or in one of the trials that a sweep may have.

    A job runs in a temporary folder of its own, where relative files are missing and results are lost.
    """
    for run in _runs_of(config):
        for key, path in _paths_of(run):
            if _is_relative(path):
                raise MarlRayError(
                    f"{key}={path!r} is relative to the job's temporary folder; give an absolute path or a URI, "
                    f"such as {key}=s3://bucket/folder"
                )


def _runs_of(config: RunConfig | SweepConfig) -> list[RunConfig]:
    """Return the run, or runs of a sweep that between them have every listed value of its space."""
    if isinstance(config, RunConfig):
        return [config]
    return [config.run_config(values, config.name, config.seeds[0]) for values in extreme_combinations(config)]


def _is_relative(path: str) -> bool:
    path = path[match.end() :] if (match := _SCHEME.match(path)) else path
    return not path.startswith(("/", "models:/")) and "://" not in path


def _paths_of(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys that name a file or a folder, with their values, also those of the environment's options."""
    for steps, text in _texts(run.model_dump(mode="json", exclude={"env"}), ()):
        key = next((key for key in PATH_KEYS if _is_at(key, steps)), None)
        # transformers takes a folder of this name, if there is one, before it looks for a model.
        if key is not None and (not re.fullmatch(PATH_KEYS[key], text) or (key == MODEL_PATH and Path(text).exists())):
            yield ".".join(steps), text
    for steps, text in _texts(run.env.kwargs, ()):
        owner = run.env.id if len(steps) == 1 else steps[1]  # such as `tools: {google_search_serper: {cache: FILE}}`
        if _is_path_option(owner, steps[-1], text):
            yield ".".join(("env.kwargs", *steps)), text


def _is_at(key: str, steps: tuple[str, ...]) -> bool:
    """Return True if a key of PATH_KEYS stands for the key with these steps."""
    patterns = key.split(".")
    return len(patterns) == len(steps) and all(
        pattern in ("*", step) for pattern, step in zip(patterns, steps, strict=True)
    )


def _is_path_option(owner: str, option: str, text: str) -> bool:
    """Return True if a text names a file or a folder in an option of an environment, a reward or a tool.

    Of a user's own part nobody knows which options do, so it is a text that is the path of something here.
    """
    if owner in _BUILTINS and option in PATH_OPTIONS:
        return re.fullmatch(PATH_OPTIONS[option], text) is None
    return "/" in text and Path(text).exists()


def _texts(data: JsonValue, steps: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the texts of plain data, each with the keys and numbers of entries that lead to it."""
    if isinstance(data, str):
        yield steps, data
    entries = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for name, value in entries:
        yield from _texts(value, (*steps, str(name)))
