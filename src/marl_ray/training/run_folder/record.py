"""The record of a run and what else lies in its folder, on any storage.

NAME/run.json        what the run is, its MLflow run, and how it ended where it has
NAME/owner/N.json    its driver: where it runs, whether it is alive, and how its attempt ended (stored_files/ownership/)
NAME/metrics.jsonl   a row of metrics for each iteration (metrics_file.py)
NAME/events.jsonl    and failures.jsonl, transcripts/, sinks/: the rest of the journal (journal/)
NAME/run.log         what the driver prints and workers' errors, with times (run_log.py)
NAME/bundle          the best bundle so far: a link, or on remote storage a file with its URI (bundle_link.py)
NAME/return.png      the curve of a finished run
NAME/checkpoint_*    the checkpoints, and starts/: where each group of workers began (checkpoints/)
NAME/errors/         the last traceback of each worker that failed, and of the driver's checks (tracebacks.py)
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypedDict, cast

from pyarrow import fs

from marl_ray.config import RunConfig, config_hash
from marl_ray.config.load import dotted_keys
from marl_ray.errors import MarlRayError, one_line
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.ray_seams import JOB_FOLDER
from marl_ray.stored_files.durability import create_folder
from marl_ray.stored_files.folder_kinds import RUN_FILE, RUN_KIND, refuse_other_kind
from marl_ray.stored_files.json_files import read_json, write_json
from marl_ray.stored_files.storages import absolute_storage, open_storage
from marl_ray.stored_files.temporary_files import temporary_path
from marl_ray.training.tracking.mlflow_run import uri_of

MAX_NAMED_KEYS = 4
"""Maximum number of keys that an error lists of those that differ."""
MAX_SHOWN = 40
"""Maximum number of characters that an error shows of a value."""
DIGEST_KEY = "sha256"
"""Key of a file of plain data for the digest of its other keys, so that one that was damaged is known."""
FINISHED_KEY: Final = "finished"
"""Key of the run's record for its result, which is stored when the run has played all its steps."""
RESULT_KEY: Final = "result"
"""Key of the result within FINISHED_KEY."""
ORIGIN_KEY: Final = "origin"
"""Key of the run's record for the checkpoint that `resume_from` named when the run last began without one of its own."""
PINNED_KEY: Final = "pinned"
"""Key of the run's record for the map from `models:/NAME@ALIAS` to the version that it named when the run began."""
NOT_IDENTITY = ("resources", "checkpoint", "tracking", "storage")
"""Keys of a config that may change when a run continues; the storage may be named by another path, or have moved."""


class FinishedRun(TypedDict):
    """The end of a run that has played all its steps."""

    total_steps: int
    """Environment steps that the run has played."""
    result: JsonObject
    """The fields of its `RunResult`, as plain data."""
    score: float | None
    """The score of its bundle on episodes that chose nothing."""


RunRecord = TypedDict(  # noqa: UP013  keys of the file, of which a class would make names
    "RunRecord",
    {
        # The part of the config that stays the same however often the run continues.
        "identity": JsonObject,
        # The config with every default written out, and the keys of it that were given.
        "config": JsonObject,
        "given": JsonObject,
        "config_hash": str,
        "mlflow_run_id": str | None,
        "finished": FinishedRun,
        "origin": str,
        "pinned": dict[str, str],
    },
    total=False,
)
"""The content of `run.json`; a record has `identity`, `config` and `config_hash` from the beginning."""


def storage_of(config: RunConfig) -> str:
    """Return the storage as a URI or an absolute path."""
    return absolute_storage(config.storage)


def filesystem_of(config: RunConfig) -> tuple[fs.FileSystem, str]:
    """Return the file system and path of the run's folder. Raises MarlRayError."""
    filesystem, root = open_storage(config.storage)
    return filesystem, f"{root}/{config.name}"


def check_folder(config: RunConfig) -> None:
    """Prove that the run's folder can be written, and leave it as it was. Raises MarlRayError."""
    if "://" not in config.storage and not Path(config.storage).is_absolute() and JOB_FOLDER in Path.cwd().parts:
        raise MarlRayError(
            f"storage: {config.storage!r} is relative to the job's temporary folder; give an absolute path or a URI"
        )
    filesystem, folder = filesystem_of(config)
    try:
        existed = filesystem.get_file_info(folder).type != fs.FileType.NotFound
        filesystem.create_dir(folder)
        probe = temporary_path(f"{folder}/write-test")
        write_json(filesystem, probe, {})
        with contextlib.suppress(FileNotFoundError):  # the owner removes such files
            filesystem.delete_file(probe)
        if not existed:
            _delete_if_empty(filesystem, folder)
    except (OSError, ValueError) as error:
        raise _unwritable_error(config, error) from error


def _delete_if_empty(filesystem: fs.FileSystem, folder: str) -> None:
    """Delete a folder in which another process may just begin a run."""
    if isinstance(filesystem, fs.LocalFileSystem):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    elif not filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
        filesystem.delete_dir(folder)


def _unwritable_error(config: RunConfig, error: Exception) -> MarlRayError:
    return MarlRayError(f"storage: {config.storage!r} cannot be written: {one_line(error)}")


def digest_of(facts: Mapping[str, object]) -> str:
    """Return the sha256 of plain data, as hexadecimal digits; the same for what JSON makes of it."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(facts)), sort_keys=True).encode()).hexdigest()


def read_record(filesystem: fs.FileSystem, folder: str) -> RunRecord | None:
    """Return the record of the run in a folder; None where there is none.

    Raises MarlRayError, which names the file, for one that cannot be read or is not as it was written.
    """
    path = f"{folder}/{RUN_FILE}"
    try:
        if filesystem.get_file_info(path).type == fs.FileType.NotFound:
            return None
        record = read_json(filesystem, path)
        if not isinstance(record, dict) or DIGEST_KEY not in record:
            raise ValueError(f"it is no JSON object with the key {DIGEST_KEY!r}")
        if record.pop(DIGEST_KEY) != digest_of(record):
            raise ValueError(f"it has another content than was written: its {DIGEST_KEY} differs")
    except (OSError, ValueError) as error:
        raise MarlRayError(
            f"storage: {path} is not the record of a run: {one_line(error)}; without this file the same command continues "
            "from the last checkpoint"
        ) from error
    return cast(RunRecord, record)


def record_of(config: RunConfig) -> RunRecord:
    """Return the run's record: the one in its folder, or a new one that is not written yet.

    Ray Train would continue any run that lies under the name, so this function must catch a name that is used again
    by accident. Raises MarlRayError if the record is another run's, or cannot be read, and if the name is a sweep's.
    """
    refuse_other_kind(config.storage, config.name, RUN_KIND)
    identity = _identity_of(config)
    filesystem, folder = filesystem_of(config)
    record = read_record(filesystem, folder)
    if record is None:
        return {"identity": identity, **config_record(config)}
    recorded_identity = dotted_keys(record["identity"])
    recorded_identity.pop("storage", None)
    own_identity = dotted_keys(json.loads(json.dumps(identity)))
    differing = sorted(
        key for key in {*own_identity, *recorded_identity} if own_identity.get(key) != recorded_identity.get(key)
    )
    if differing:
        _check_names_of_environment(config, differing)
        named = [_describe_difference(key, recorded_identity, own_identity) for key in differing[:MAX_NAMED_KEYS]]
        more = ", ..." if len(differing) > MAX_NAMED_KEYS else ""
        raise MarlRayError(
            f"name: run {config.name!r} exists under {config.storage!r} with another {', '.join(named)}{more}; "
            "choose another name, or the same config to resume it"
        )
    return record


def _check_names_of_environment(config: RunConfig, differing: Iterable[str]) -> None:
    """Make the environment, if the config names another than the record, so that a typo is what the user reads of."""
    if not any(key.startswith("env.") for key in differing):
        return
    from marl_ray.envs.registry import make_env

    try:
        make_env(config.env, config.constraints).close()
    except MarlRayError:
        raise
    except Exception:  # a user's environment may raise anything, which the checks of a run report
        return


def _describe_difference(key: str, before: JsonMapping, now: JsonMapping) -> str:
    """Return a key with the value that a run has and the one that a config has."""
    values = (str(flat[key]) if key in flat else "none" for flat in (before, now))
    shown = [text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..." for text in values]
    return f"{key} ({shown[0]}, not {shown[1]})"


def identity_hash(config: RunConfig) -> str:
    """Return the sha256 of the part of a run's config that stays the same however often the run continues."""
    return hashlib.sha256(json.dumps(_identity_of(config), sort_keys=True).encode()).hexdigest()


def _identity_of(config: RunConfig) -> JsonObject:
    """Return the part of a run's config that stays the same however often the run continues."""
    identity = {key: value for key, value in config.resolve().items() if key not in NOT_IDENTITY}
    # A finished run may be made longer, and the size of micro-batches changes no result.
    identity["train"] = {k: v for k, v in identity["train"].items() if k not in ("total_steps", "micro_batch")}
    return identity


def config_record(config: RunConfig) -> RunRecord:
    """Return the part of a run's record that changes when its config does.

    That part is the config, resolved and as it was given, and its hash.
    """
    return {"config": config.resolve(), "given": config.as_given(), "config_hash": config_hash(config)}


def pin_bundles(config: RunConfig, record: RunRecord) -> JsonObject:
    """Return the config as plain data, with a version in place of every alias of `team`.

    The version is the one that the alias named when the run began. The versions are kept in `record`, because a
    frozen policy is read anew at every start, and by then an alias may name another version.
    """
    from marl_ray.policies.bundles.manifest import pin_reference

    data, versions = config.as_given(), record.setdefault(PINNED_KEY, {})
    team = data.get("team", {})
    for name, policy in config.team.items():
        places = [(policy.bundle, team.get(name, {}), "bundle")]
        if policy.model is not None:
            places.append((policy.model.path, team.get(name, {}).get("model", {}), "path"))
        for reference, place, key in places:
            if reference is not None and key in place:
                version = versions.get(reference) or pin_reference(reference, uri_of(config))
                if version != reference:
                    versions[reference] = version
                place[key] = version
    return data


def write_record(config: RunConfig, record: RunRecord) -> None:
    """Make the run's folder, and write this record to it; on a local disk it outlasts a loss of power. Raises OSError."""
    filesystem, folder = filesystem_of(config)
    create_folder(filesystem, folder)
    write_json(filesystem, f"{folder}/{RUN_FILE}", {**record, DIGEST_KEY: digest_of(record)}, durable=True)
