"""The checkpoints of a run's folder, by their manifests: which there are, which to continue from, which to keep.

A checkpoint is `checkpoint_ITERATION_ATTEMPT`, where ATTEMPT numbers the groups of workers. Names sort by age. A group never
writes into a folder of another, which may still be alive on a machine that was cut off.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.training.checkpoints.manifest import (
    MANIFEST,
    WITHDRAWN,
    CheckpointManifest,
    check_format,
    read_manifest,
)
from marl_ray.training.checkpoints.storage import Damaged, StoredFolder, check_known, check_size, read_file
from marl_ray.training.run_folder.record import filesystem_of

PREFIX = "checkpoint_"
STATE = "state.json"
"""The file of a checkpoint with the state that is equal on all workers."""
BUNDLE = "bundle"
"""Folder of the bundle in a checkpoint that was the best so far."""


class Published(NamedTuple):
    """A complete checkpoint, as far as its manifest tells."""

    place: StoredFolder
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        return self.place.path.rpartition("/")[2]

    @property
    def has_bundle(self) -> bool:
        return any(file.startswith(f"{BUNDLE}/") for file in self.manifest.files)


def attempt_number() -> int:
    """A number for a new group of workers, greater than those of the groups before it."""
    return int(time.time())


def checkpoint_name(iteration: int, attempt: int) -> str:
    """The name of the folder of a new checkpoint."""
    return f"{PREFIX}{iteration:08d}_{attempt:010d}"


def checkpoints_in(folder: StoredFolder) -> list[StoredFolder]:
    """The folders with a manifest, the oldest first. Raises OSError, and MarlRayError if all that is there is of an older
    format."""
    folders = _folders(folder)
    complete = [place for place in folders if is_checkpoint(place)]
    if not complete:
        for place in folders:
            refuse_older(place)
    return complete


def published(folder: StoredFolder) -> list[Published]:
    """The checkpoints whose manifests can be read, the oldest first; empty where the folder cannot be listed."""
    listed = []
    with contextlib.suppress(OSError, MarlRayError):
        for place in checkpoints_in(folder):
            with contextlib.suppress(OSError, MarlRayError):
                manifest = read_manifest(place)
                if manifest is not None:
                    listed.append(Published(place, manifest))
    return listed


def is_checkpoint(place: StoredFolder) -> bool:
    """True if a folder has a manifest; raises OSError."""
    return bool(place.filesystem.get_file_info((place / MANIFEST).path).type == fs.FileType.File)


def newest(folder: StoredFolder) -> Published | None:
    """The newest checkpoint; None where there is none."""
    return next(reversed(published(folder)), None)


def best(checkpoints: Sequence[Published]) -> Published | None:
    """The best of these that have a bundle. Equal scores are those of a run that scores nothing: then the newest counts."""
    with_bundle = [checkpoint for checkpoint in checkpoints if checkpoint.has_bundle]
    return max(with_bundle, key=lambda each: (each.manifest.score, each.name), default=None)


def check_bundle(checkpoint: Published, sizes: bool = False) -> None:
    """Raise Damaged, which names it, if a file of the checkpoint's bundle is not as it was written, or OSError. With `sizes`
    the files are not read, and only their sizes are compared."""
    for name, file in checkpoint.manifest.files.items():
        if name.startswith(f"{BUNDLE}/"):
            (check_size if sizes else check_known)(checkpoint.place / name, file)


def best_whole(
    checkpoints: Sequence[Published], sizes: bool = False
) -> tuple[Published | None, list[tuple[StoredFolder, str]]]:
    """The best of these whose bundle is as it was written, compared as by `check_bundle`, or None; and those that would be
    better and are damaged, each with a line that says how. Raises OSError."""
    damaged: list[tuple[StoredFolder, str]] = []
    left = list(checkpoints)
    while (chosen := best(left)) is not None:
        try:
            check_bundle(chosen, sizes)
            break
        except Damaged as error:
            damaged.append((chosen.place, f"{error}; this bundle, the best so far, is lost"))
            left.remove(chosen)
    return chosen, damaged


def kept(config: RunConfig) -> str:
    """One sentence that names the checkpoint of the run's folder from which the same command continues."""
    latest = newest(StoredFolder(*filesystem_of(config)))
    if latest is None:
        return "no checkpoint had been written, so the same command begins anew"
    at = latest.manifest
    return f"kept iteration {at.iteration:,}, step {at.steps:,} in {latest.place}; the same command goes on from there"


def unneeded(checkpoints: Sequence[Published], keep: int, interval: int | None) -> list[Published]:
    """The checkpoints to remove of these, which are the oldest first: all but the newest `keep`, the best, and the first of
    every `interval` iterations."""
    kept = {checkpoint.name for checkpoint in checkpoints[-keep:]}
    chosen = best(checkpoints)
    if chosen is not None:
        kept.add(chosen.name)
    if interval is not None:
        firsts: dict[int, str] = {}
        for checkpoint in checkpoints:
            firsts.setdefault(checkpoint.manifest.iteration // interval, checkpoint.name)
        kept |= set(firsts.values())
    return [checkpoint for checkpoint in checkpoints if checkpoint.name not in kept]


def tidy(folder: StoredFolder, keep: int, interval: int | None, attempt: int) -> None:
    """Remove the checkpoints that are not needed, and what this `attempt` and those before it have left unfinished; raises
    OSError. This attempt writes none meanwhile; a later one may, if this one was cut off and does not know that."""
    for checkpoint in unneeded(published(folder), keep, interval):
        folder.filesystem.delete_file((checkpoint.place / MANIFEST).path)
        folder.filesystem.delete_dir(checkpoint.place.path)
    for place in _folders(folder):
        number = place.path.rpartition("_")[2]
        ended = number.isdecimal() and int(number) <= attempt
        if ended and not is_checkpoint(place) and not is_checkpoint(place / WITHDRAWN):
            folder.filesystem.delete_dir(place.path)


def refuse_older(place: StoredFolder) -> None:
    """Raise MarlRayError if a folder without a manifest is a checkpoint of an older format."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        data = read_file(place / STATE)
        if data is not None and not is_checkpoint(place) and "format" in (facts := json.loads(data)):
            try:
                check_format(facts)
            except MarlRayError as error:
                raise MarlRayError(f"{place} {error}") from error


def _folders(folder: StoredFolder) -> list[StoredFolder]:
    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    names = sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)
    return [folder / name for name in names if name.startswith(PREFIX)]
