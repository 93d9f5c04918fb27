"""The checkpoint from which a run with `resume_from` begins: it is looked up, and proved complete and fit for the run.

A checkpoint fits if it holds the same trained policies, and for each the same weights, optimiser state and multipliers.
Hyper-parameters, the amount of experience, evaluations and frozen policies may differ.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.training.run_folder.record import latest_checkpoint, storage_of

FORMAT = 1
"""Version of a checkpoint's layout."""
STATE = "state.json"
WEIGHTS = "weights"
HOLDS = "holds"
"""Key of a checkpoint's state: policy -> the facts on which the layout of its weights and its state depend."""
PLAY = "play"
"""Key of a checkpoint's state: the facts on which the running episodes of the environment copies depend."""


def source_of(config: RunConfig) -> str | None:
    """The checkpoint that `resume_from` names, as an absolute path or a URI: the latest one of a run's name or folder, or
    the checkpoint itself; None without `resume_from`. Raises MarlRayError if there is none."""
    given = config.resume_from
    if given is None:
        return None
    if "://" in given:
        folder = given.rstrip("/")
    elif "/" in given:
        folder = str(Path(given).expanduser().resolve())
    else:
        folder = f"{storage_of(config).rstrip('/')}/{given}"
    try:
        filesystem, path = fs.FileSystem.from_uri(folder)
        if filesystem.get_file_info(f"{path}/{WEIGHTS}").type == fs.FileType.Directory:
            return folder
        latest = latest_checkpoint(filesystem, path)
    except (OSError, ValueError) as error:
        raise MarlRayError(f"resume_from: {given!r} cannot be read: {one_line(error)}") from error
    if latest is None:
        raise MarlRayError(
            f"resume_from: {given!r} is no checkpoint, and no run that has one; looked for {folder}/{WEIGHTS}"
        )
    return f"{folder}/{latest['checkpoint_dir_name']}"


def check_source(config: RunConfig, source: str, holds: Mapping[str, Any]) -> None:
    """Raise MarlRayError unless the checkpoint at `source` is complete and fits a run whose policies hold `holds`."""
    try:
        filesystem, path = fs.FileSystem.from_uri(source)
        state = _complete_state(filesystem, path)
    except MarlRayError as error:
        raise MarlRayError(f"resume_from: {source} {error}") from error
    except Exception as error:  # a damaged file may raise anything
        raise MarlRayError(f"resume_from: {source} is damaged: {one_line(error)}") from error
    for name in sorted({*holds, *state[HOLDS]}):
        if name not in holds or name not in state[HOLDS]:
            where = "the checkpoint" if name in state[HOLDS] else "this run"
            raise MarlRayError(
                f"resume_from: {source} holds the trained policies {', '.join(state[HOLDS])}; expected "
                f"{', '.join(holds)} ({name} is in {where} alone)"
            )
        own = json.loads(json.dumps(holds[name]))
        for key, value in own.items():
            if state[HOLDS][name].get(key) != value:
                raise MarlRayError(
                    f"resume_from: {source} has another {key} of policy {name!r}: {state[HOLDS][name].get(key)}, where "
                    f"this run has {value}"
                )
    if state["steps"] >= config.train.total_steps:
        raise MarlRayError(
            f"train.total_steps={config.train.total_steps}: expected more than the {state['steps']} steps that "
            f"{source} has played, which count"
        )


def _complete_state(filesystem: fs.FileSystem, path: str) -> dict[str, Any]:
    """The state of a checkpoint of which every file is there; raises MarlRayError without the checkpoint's name."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with filesystem.open_input_stream(f"{path}/{STATE}") as stream:
        state: dict[str, Any] = json.loads(stream.read())
    check_format(state)
    with tempfile.TemporaryDirectory(prefix="marl-ray-") as temporary:
        with filesystem.open_input_stream(f"{path}/{WEIGHTS}/.metadata") as stream:
            Path(temporary, ".metadata").write_bytes(stream.read())
        parts = FileSystemReader(temporary).read_metadata().storage_data or {}
    ends: dict[str, int] = {}
    for part in parts.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        info = filesystem.get_file_info(f"{path}/{WEIGHTS}/{name}")
        if info.type != fs.FileType.File or info.size < end:
            raise MarlRayError(f"is damaged: {WEIGHTS}/{name} is missing or has been cut")
    return state


def check_format(state: Mapping[str, Any]) -> None:
    """Raise MarlRayError if a checkpoint's state is of another version."""
    if state.get("format") != FORMAT:
        raise MarlRayError(
            f"has checkpoint format {state.get('format')}, expected {FORMAT}; it can be read by the version of marl-ray "
            "that wrote it"
        )


def holds_of(config: RunConfig, env: Any, agents: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Trained policy -> the facts on which the layout of its weights, its optimiser and its multipliers depends."""
    from marl_ray.algorithms import algorithm_of

    holds: dict[str, Any] = {}
    for name, members in agents.items():
        policy = config.team[name]
        if policy.frozen:
            continue
        spec, hyper = config.spec_of(name), config.hyper_of(name)
        if policy.model is None:
            shape = {
                "network": policy.network.model_dump(mode="json"),
                "observations": str(env.observation_space(members[0])),
                "actions": str(env.action_space(members[0])),
            }
        else:
            model = policy.model.model_dump(mode="json", include={"path", "preset", "lora"})
            shape = {"model": model | {"bundle": policy.bundle} if policy.model.path is None else model}
        make = algorithm_of(config.algorithm_of(name)).multiplier if spec.costs else None
        holds[name] = shape | {
            "agents": list(members),
            "critic": spec.critic,
            "optimizer": "trust region" if spec.constraint == "trust_region" else hyper.optimizer,
            "cost critics": len(config.constraints) if spec.costs else 0,
            "multipliers": [type(make(hyper, budget)).__name__ for budget in config.budgets] if make else [],
        }
    return holds


def play_of(config: RunConfig) -> dict[str, Any]:
    """The facts under which the running episodes, and the means over recent ones, go on after another run's checkpoint."""
    data = config.resolved()
    train = {key: data["train"][key] for key in ("env_copies", "group_size", "curriculum")}
    team = {name: [policy["agents"], policy["frozen"] and policy["bundle"]] for name, policy in data["team"].items()}
    places = {key: data[key] for key in ("env", "seed", "constraints", "data")}
    played: dict[str, Any] = json.loads(
        json.dumps(places | train | {"team": team, "whole_episodes": config.whole_episodes})
    )
    return played
