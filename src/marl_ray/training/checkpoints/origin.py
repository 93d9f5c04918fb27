"""The checkpoint from which a run with `resume_from` begins.

It is looked up, and proved complete and fit for the run. A checkpoint fits if it holds the same trained policies, and
for each the same weights, optimiser state and multipliers. Hyper-parameters, the amount of experience, evaluations and
frozen policies may differ.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError, one_line, suggestion
from marl_ray.json_types import JsonMapping
from marl_ray.policies.bundles.manifest import MANIFEST_FILE as BUNDLE
from marl_ray.training.checkpoints.index import STATE_FILE, find_newest, is_checkpoint, refuse_older_format
from marl_ray.training.checkpoints.manifest import MANIFEST_FILE, read_manifest
from marl_ray.training.checkpoints.run_state import RunState, StateFile
from marl_ray.training.checkpoints.storage import StoredFolder, read_verified
from marl_ray.training.run_folder.record import storage_of

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv


def source_of(config: RunConfig) -> str | None:
    """Return the checkpoint that `resume_from` names, as an absolute path or a URI.

    The checkpoint is the latest one of a run's name or folder, or the checkpoint itself; None without `resume_from`.
    Raises MarlRayError if there is none.
    """
    resume_from = config.resume_from
    if resume_from is None:
        return None
    if "://" in resume_from:
        folder = resume_from.rstrip("/")
    elif "/" in resume_from:
        folder = str(Path(os.path.expanduser(resume_from)).resolve())
    else:
        folder = f"{storage_of(config).rstrip('/')}/{resume_from}"
    try:
        place = StoredFolder(*fs.FileSystem.from_uri(folder))
        if is_checkpoint(place):
            return folder
        refuse_older_format(place)
        latest = find_newest(place)
    except MarlRayError as error:
        raise MarlRayError(f"resume_from: {error}") from error
    except (OSError, ValueError) as error:
        raise MarlRayError(f"resume_from: {resume_from!r} cannot be read: {one_line(error)}") from error
    if latest is None:
        if resume_from.startswith("models:/") or _is_bundle(place):
            raise MarlRayError(
                f"resume_from: {resume_from!r} is a bundle, which has no optimiser; expected a run's name, its folder or a "
                f"checkpoint in it; a new run from a bundle's weights has team.NAME.bundle={resume_from}"
            )
        raise MarlRayError(
            f"resume_from: {resume_from!r} is no checkpoint, and no run that has one; looked for {folder}/{MANIFEST_FILE}"
            + suggestion(place.path.rpartition("/")[2], _sibling_names(place))
        )
    return f"{folder}/{latest.name}"


def _sibling_names(place: StoredFolder) -> list[str]:
    """Return the names of the other folders in the one that holds a folder, or would hold it."""
    parent, _, name = place.path.rpartition("/")
    try:
        infos = place.filesystem.get_file_info(fs.FileSelector(parent, allow_not_found=True))
    except OSError:
        return []
    return [info.base_name for info in infos if info.type == fs.FileType.Directory and info.base_name != name]


def _is_bundle(place: StoredFolder) -> bool:
    return bool(place.filesystem.get_file_info((place / BUNDLE).path).type == fs.FileType.File)


def check_source(config: RunConfig, source: str, layouts: JsonMapping) -> None:
    """Raise MarlRayError unless the checkpoint at `source` is complete and fits a run with these `state_layouts`."""
    try:
        state = _read_complete_state(StoredFolder(*fs.FileSystem.from_uri(source)))
    except MarlRayError as error:
        text = str(error)
        raise MarlRayError(f"resume_from: {text if source in text else f'{source} {text}'}") from error
    except OSError as error:
        raise MarlRayError(f"resume_from: {source} cannot be read: {one_line(error)}") from error
    for name in sorted({*layouts, *state.layouts}):
        if name not in layouts or name not in state.layouts:
            where = "the checkpoint" if name in state.layouts else "this run"
            raise MarlRayError(
                f"resume_from: {source} holds the trained policies {', '.join(state.layouts)}; expected "
                f"{', '.join(layouts)} ({name} is in {where} alone)"
            )
        expected_facts = json.loads(json.dumps(layouts[name]))
        for key, value in expected_facts.items():
            if state.layouts[name].get(key) != value:
                raise MarlRayError(
                    f"resume_from: {source} has another {key} of policy {name!r}: {state.layouts[name].get(key)}, where "
                    f"this run has {value}"
                )
    if state.steps >= config.train.total_steps:
        raise MarlRayError(
            f"train.total_steps={config.train.total_steps}: expected more than the {state.steps} steps that "
            f"{source} has played, which count"
        )


def _read_complete_state(place: StoredFolder) -> RunState:
    """Return the state of a checkpoint of which every file is there in its size. Raises MarlRayError or OSError."""
    manifest = read_manifest(place)
    if manifest is None:
        refuse_older_format(place)
        raise MarlRayError("is no complete checkpoint: it has no manifest.json")
    for name, file in manifest.files.items():
        info = place.filesystem.get_file_info((place / name).path)
        if info.type != fs.FileType.File or info.size != file.size:
            raise MarlRayError(f"is damaged: {name} is missing or has another size")
    return StateFile.decode(read_verified(place / STATE_FILE, manifest.files[STATE_FILE])).state


def state_after(
    config: RunConfig, other: RunState, envs: Mapping[str, object], checkpoint_uri: str, initial: RunState
) -> tuple[RunState, Mapping[str, object] | None]:
    """Return the state with which a run begins after another one's checkpoint, and its copies' snapshot.

    Counters continue, and evaluations begin anew. Running episodes and means over recent ones continue if both runs play
    alike; else there is no snapshot of environment copies.

    `other` and `envs` are of the checkpoint, and `initial` is the state of a run that begins anew.
    """
    state = replace(
        initial,
        iteration=other.iteration,
        steps=other.steps,
        tokens=other.tokens,
        seconds=other.seconds,
        origin={"run": other.run, "steps": other.steps, "checkpoint": checkpoint_uri},
    )
    if other.play_facts != play_facts(config):
        return state, None
    return replace(state, recent=other.recent, costs=other.costs), envs


def state_layouts(
    config: RunConfig, env: "ParallelEnv | AECEnv", agents: Mapping[str, Sequence[str]]
) -> dict[str, object]:
    """Return trained policy -> the facts on which the layout of its weights, optimiser and multipliers depends."""
    from marl_ray.algorithms import algorithm_of

    layouts: dict[str, object] = {}
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
            if policy.model.lora is not None and policy.model.path is None and policy.bundle is None:
                model["seed"] = config.seed  # it makes the frozen weights, which are not in a checkpoint
            shape = {"model": model | {"bundle": policy.bundle} if policy.model.path is None else model}
        make = algorithm_of(config.algorithm_of(name)).multiplier if spec.needs_costs else None
        layouts[name] = shape | {
            "agents": list(members),
            "critic": spec.critic,
            "optimizer": "trust region" if spec.constraint == "trust_region" else hyper.optimizer,
            "cost critics": len(config.constraints) if spec.needs_costs else 0,
            "multipliers": [type(make(hyper, budget)).__name__ for budget in config.budgets] if make else [],
        }
    return layouts


def play_facts(config: RunConfig) -> dict[str, object]:
    """Return the facts that decide if another run's episodes continue after its checkpoint.

    The running episodes, and the means over recent ones, continue where the facts are the same.
    """
    data = config.resolve()
    train = {key: data["train"][key] for key in ("env_copies", "group_size", "curriculum")}
    team = {name: [policy["agents"], policy["frozen"] and policy["bundle"]] for name, policy in data["team"].items()}
    places = {key: data[key] for key in ("env", "seed", "constraints", "data")}
    facts: dict[str, object] = json.loads(
        json.dumps(places | train | {"team": team, "whole_episodes": config.has_whole_episodes})
    )
    return facts
