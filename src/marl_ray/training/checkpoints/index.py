"""The checkpoints of a run's folder, by their manifests.

This file says which there are, which to continue from, and which to keep. A checkpoint is
`checkpoint_ITERATION_ATTEMPT`, where ATTEMPT numbers the groups of workers. Names sort by age. A group never writes
into a folder of another, which may still be alive on a machine that was cut off.

`starts/ATTEMPT` says that a group has taken this number, and `starts/ATTEMPT_ITERATION` that it has begun, and from the
checkpoint of which iteration: it plays all later ones again, and their rows of metrics are its own. A later checkpoint of an
earlier group is thus a stray and counts for nothing, even where that group completes it only afterwards.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.checkpoints.manifest import (
    MANIFEST_FILE,
    WITHDRAWN_FOLDER,
    CheckpointManifest,
    check_format,
    read_manifest,
    withdraw_manifest,
)
from marl_ray.training.checkpoints.storage import (
    DamagedCheckpointError,
    StoredFolder,
    check_content,
    check_size,
    read_file,
)
from marl_ray.training.run_folder.record import filesystem_of

PREFIX = "checkpoint_"
CHECKPOINT_NAME = re.compile(rf"{PREFIX}(\d+)(?:_(\d+))?")
"""Name of a checkpoint's folder, with iteration and attempt.

Other folders, such as `checkpoint_backup`, are neither read nor removed."""
STARTS_FOLDER = "starts"
"""Folder of the starts of groups in a run's folder; each is an empty file."""
START_NAME = re.compile(r"(\d+)(?:_(\d+|anew))?")
"""Name of a start: the attempt, and, once it has begun, the iteration that it continues from or `anew`."""
STATE_FILE = "state.json"
"""The file of a checkpoint with the state that is equal on all workers."""
BUNDLE_FOLDER = "bundle"
"""Folder of the bundle in a checkpoint that was the best so far."""


class ReplacedError(MarlRayError):
    """Another group of workers has begun in place of this one."""


class PublishedCheckpoint(NamedTuple):
    """A complete checkpoint, as far as its manifest tells."""

    place: StoredFolder
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.place.path.rpartition("/")[2]

    @property
    def has_bundle(self) -> bool:
        """True if it has a bundle, which only the best checkpoint so far has."""
        return any(file.startswith(f"{BUNDLE_FOLDER}/") for file in self.manifest.files)


def take_attempt_number(folder: StoredFolder) -> int:
    """Take the number of a new group of workers, and return it.

    The number is greater than those of the groups before it. It is the time in milliseconds, or one more than
    theirs where groups begin at once or the clock was set back. Rank 0 takes it before all else, so that a group that
    sleeps afterwards learns of the next. Raises OSError.
    """
    names = (_match_name(place) for place in _list_folders(folder))
    before = [int(name[2]) for name in names if name is not None and name[2] is not None]
    attempt = max(time.time_ns() // 1_000_000, 1 + max([*before, *_read_starts(folder)], default=0))
    _write_start(folder, f"{attempt:010d}")
    return attempt


def checkpoint_name(iteration: int, attempt: int) -> str:
    """Return the name of the folder of a new checkpoint."""
    return f"{PREFIX}{iteration:08d}_{attempt:010d}"


def note_start(folder: StoredFolder, attempt: int, after: int | None) -> None:
    """Say that this group continues from the checkpoint of iteration `after`, or begins anew where it is None.

    Call this before the rows after the checkpoint are removed. Raises OSError.
    """
    _write_start(folder, f"{attempt:010d}_{'anew' if after is None else f'{after:08d}'}")


def check_last_group(folder: StoredFolder, attempt: int) -> None:
    """Raise ReplacedError if a later group has taken a number. Raises OSError."""
    last = max(_read_starts(folder), default=attempt)
    if last > attempt:
        raise ReplacedError(f"{folder}: other workers have begun in place of these, which gave no sign; these stop")


def check_rows_own(folder: StoredFolder, attempt: int, after: int | None) -> None:
    """Raise ReplacedError if a later group has taken a number.

    Call this when the rows after iteration `after` have been removed, which may be the later group's: the
    checkpoints that cover them are strays from then on. Raises OSError.
    """
    try:
        check_last_group(folder, attempt)
    except ReplacedError:
        note_start(folder, take_attempt_number(folder), after)
        raise


def _write_start(folder: StoredFolder, name: str) -> None:
    """Write the empty file of a start. Raises OSError."""
    folder.filesystem.create_dir((folder / STARTS_FOLDER).path)
    with folder.filesystem.open_output_stream((folder / STARTS_FOLDER / name).path) as stream:
        stream.write(b"")


def checkpoints_in(folder: StoredFolder) -> list[StoredFolder]:
    """Return the folders with a manifest that are no strays, the oldest first.

    Raises OSError, and MarlRayError if all that is there is of an older format.
    """
    folders = _list_folders(folder)
    complete = [place for place in folders if _match_name(place) and is_checkpoint(place)]
    if not complete:
        for place in folders:
            refuse_older_format(place)
    starts = _read_starts(folder) if complete else {}
    return [place for place in complete if not _is_stray(place, starts)]


def own_checkpoints(
    folder: StoredFolder, identity: str, say: Callable[[str], None] = lambda line: None
) -> list[StoredFolder]:
    """Return the folders that hold a checkpoint of this run, the oldest first.

    Folders without a manifest hold none. Those that were copied there from another run, or from another iteration, are
    left out and withdrawn, and `say` gets a line about each; where there are no others, MarlRayError has the lines, and
    nothing is withdrawn. A manifest that cannot be read is no reason to leave its folder out. Raises OSError.
    """
    own_places: list[StoredFolder] = []
    mismatched: list[tuple[StoredFolder, str]] = []
    for place in checkpoints_in(folder):
        mismatch = _explain_mismatch(place, identity)
        if mismatch:
            mismatched.append((place, mismatch))
        else:
            own_places.append(place)
    if mismatched and not own_places:
        raise MarlRayError("; ".join(mismatch for _, mismatch in mismatched))
    for place, mismatch in mismatched:
        say(f"{mismatch}; it is left out")
        with contextlib.suppress(OSError, NotImplementedError):  # then the next start leaves it out again
            withdraw_manifest(place)
    for place in _list_strays(folder):
        say(f"{place} is of workers whose iterations others have played again; it is left out")
    return own_places


def _explain_mismatch(place: StoredFolder, identity: str) -> str:
    """Return the reason why a folder holds no checkpoint of this run or of the iteration in its name, else ""."""
    name = _match_name(place)
    try:
        manifest = read_manifest(place)
    except (OSError, MarlRayError):  # a manifest that cannot be read is no reason
        return ""
    if manifest is None or name is None:
        return ""
    if manifest.identity != identity:
        return f"{place} is a checkpoint of another run, {manifest.run!r} with another config"
    if manifest.iteration != int(name[1]):
        return f"{place} is a copy of the checkpoint of iteration {manifest.iteration:,}"
    return ""


def published_checkpoints(folder: StoredFolder) -> list[PublishedCheckpoint]:
    """Return the checkpoints whose manifests can be read, the oldest first.

    There are none where the folder cannot be listed.
    """
    listed = []
    with contextlib.suppress(OSError, MarlRayError):
        for place in checkpoints_in(folder):
            with contextlib.suppress(OSError, MarlRayError):
                manifest = read_manifest(place)
                if manifest is not None:
                    listed.append(PublishedCheckpoint(place, manifest))
    return listed


def is_checkpoint(place: StoredFolder) -> bool:
    """Return True if a folder has a manifest. Raises OSError."""
    return bool(place.filesystem.get_file_info((place / MANIFEST_FILE).path).type == fs.FileType.File)


def find_newest(folder: StoredFolder) -> PublishedCheckpoint | None:
    """Return the newest checkpoint; None where there is none."""
    return next(reversed(published_checkpoints(folder)), None)


def find_best(checkpoints: Sequence[PublishedCheckpoint]) -> PublishedCheckpoint | None:
    """Return the best of these that have a bundle; None if none has one.

    Equal scores are those of a run that scores nothing: then the newest counts.
    """
    candidates = [checkpoint for checkpoint in checkpoints if checkpoint.has_bundle]
    return max(candidates, key=lambda each: (each.manifest.score, each.name), default=None)


def check_bundle(checkpoint: PublishedCheckpoint, sizes: bool = False) -> None:
    """Raise DamagedCheckpointError if a file of the checkpoint's bundle is not as it was written.

    The error names the file. With `sizes` the files are not read, and only their sizes are compared. Raises OSError
    where the storage fails.
    """
    for name, file in checkpoint.manifest.files.items():
        if name.startswith(f"{BUNDLE_FOLDER}/"):
            (check_size if sizes else check_content)(checkpoint.place / name, file)


def find_best_undamaged(
    checkpoints: Sequence[PublishedCheckpoint], sizes: bool = False
) -> tuple[PublishedCheckpoint | None, list[tuple[StoredFolder, str]]]:
    """Return the best of these whose bundle is as it was written, and the damaged ones that would be better.

    The bundles are compared as by `check_bundle`. The first is None if no bundle is whole; each damaged checkpoint
    comes with a line that says how. Raises OSError.
    """
    damaged: list[tuple[StoredFolder, str]] = []
    candidates = list(checkpoints)
    while (best_checkpoint := find_best(candidates)) is not None:
        try:
            check_bundle(best_checkpoint, sizes)
            break
        except DamagedCheckpointError as error:
            damaged.append((best_checkpoint.place, f"{error}; this bundle, the best so far, is lost"))
            candidates.remove(best_checkpoint)
    return best_checkpoint, damaged


def resume_line(config: RunConfig) -> str:
    """Return one sentence that names the checkpoint of the run's folder from which the same command continues."""
    latest = find_newest(StoredFolder(*filesystem_of(config)))
    if latest is None:
        return "no checkpoint had been written, so the same command begins anew"
    manifest = latest.manifest
    return (
        f"kept iteration {manifest.iteration:,}, step {manifest.steps:,} in {latest.place}; the same command continues "
        "from there"
    )


def kept_line(config: RunConfig) -> str:
    """Return the line that names the last checkpoint of a run that stopped, or says that it has none."""
    latest = find_newest(StoredFolder(*filesystem_of(config)))
    return "no checkpoint had been written" if latest is None else f"its last checkpoint is kept: {latest.place}"


def unneeded_checkpoints(
    checkpoints: Sequence[PublishedCheckpoint], keep: int, interval: int | None
) -> list[PublishedCheckpoint]:
    """Return those of these checkpoints, the oldest first, that are to be removed.

    All are removed but the newest `keep`, the best, and the first of every `interval` iterations.
    """
    needed = {checkpoint.name for checkpoint in checkpoints[-keep:]}
    best_checkpoint = find_best(checkpoints)
    if best_checkpoint is not None:
        needed.add(best_checkpoint.name)
    if interval is not None:
        firsts: dict[int, str] = {}
        for checkpoint in checkpoints:
            firsts.setdefault(checkpoint.manifest.iteration // interval, checkpoint.name)
        needed |= set(firsts.values())
    return [checkpoint for checkpoint in checkpoints if checkpoint.name not in needed]


def remove_unneeded(folder: StoredFolder, keep: int, interval: int | None, attempt: int) -> None:
    """Remove the checkpoints that are not needed, and what attempts up to this one left unfinished.

    This `attempt` writes none meanwhile; a later one may, if this one was cut off and does not know that.
    Raises OSError.
    """
    for checkpoint in unneeded_checkpoints(published_checkpoints(folder), keep, interval):
        folder.filesystem.delete_file((checkpoint.place / MANIFEST_FILE).path)
        folder.filesystem.delete_dir(checkpoint.place.path)
    for place in _list_strays(folder):
        withdraw_manifest(place)
    for place in _list_folders(folder):
        name = _match_name(place)
        ended = name is not None and name[2] is not None and int(name[2]) <= attempt
        if ended and not is_checkpoint(place) and not is_checkpoint(place / WITHDRAWN_FOLDER):
            folder.filesystem.delete_dir(place.path)


def refuse_older_format(place: StoredFolder) -> None:
    """Raise MarlRayError if a folder without a manifest is a checkpoint of an older format."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        data = read_file(place / STATE_FILE)
        if data is not None and not is_checkpoint(place) and "format" in (facts := json.loads(data)):
            try:
                check_format(facts)
            except MarlRayError as error:
                raise MarlRayError(f"{place} {error}") from error


def _match_name(place: StoredFolder) -> re.Match[str] | None:
    """Match the name of a folder with CHECKPOINT_NAME; None for the folder of something else."""
    return CHECKPOINT_NAME.fullmatch(place.path.rpartition("/")[2])


def _read_starts(folder: StoredFolder) -> dict[int, int | None]:
    """Return attempt -> the iteration of the checkpoint that it continued from.

    The iteration is -1 where the attempt began anew, and None before it has begun. Raises OSError.
    """
    infos = folder.filesystem.get_file_info(fs.FileSelector((folder / STARTS_FOLDER).path, allow_not_found=True))
    starts: dict[int, int | None] = {}
    for name in filter(None, (START_NAME.fullmatch(info.base_name) for info in infos)):
        attempt, after = int(name[1]), name[2]
        if after is None:
            starts.setdefault(attempt, None)
        else:
            starts[attempt] = -1 if after == "anew" else int(after)
    return starts


def _list_strays(folder: StoredFolder) -> list[StoredFolder]:
    """Return the checkpoints of iterations that later groups play again, the oldest first. Raises OSError."""
    starts = _read_starts(folder)
    return [place for place in _list_folders(folder) if _is_stray(place, starts) and is_checkpoint(place)]


def _is_stray(place: StoredFolder, starts: Mapping[int, int | None]) -> bool:
    """Return True for the checkpoint of iterations that a later group plays again."""
    name = _match_name(place)
    if name is None or name[2] is None:
        return False
    iterations = ((attempt, after) for attempt, after in starts.items() if after is not None)
    return any(int(name[2]) < attempt and after < int(name[1]) for attempt, after in iterations)


def _list_folders(folder: StoredFolder) -> list[StoredFolder]:
    """Return the folders whose names begin with PREFIX, by name, which is by age. Raises OSError."""
    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    names = sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)
    return [folder / name for name in names if name.startswith(PREFIX)]
