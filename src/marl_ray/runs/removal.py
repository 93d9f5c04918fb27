"""Deletes the folder of a run or a sweep, and reports beforehand what is in it."""

import time
from dataclasses import dataclass

from pyarrow import fs

from marl_ray.errors import MarlRayError, one_line
from marl_ray.runs.stored import StoredEntry
from marl_ray.stored_files.ownership.lease import Lease
from marl_ray.training.checkpoints.manifest import MANIFEST_FILE


@dataclass(frozen=True)
class FolderContents:
    """Counts of what the folder of a run or a sweep holds."""

    name: str
    folder: str
    """Folder or URI."""
    files: int
    bytes: int
    checkpoints: int
    """Complete checkpoints; a trial of a sweep has one for each seed."""
    mlflow_run_id: str | None
    """The MLflow run, of a sweep the parent run, which stays, as do registered models."""


def contents_of(entry: StoredEntry) -> FolderContents:
    """Count what `remove_folder` would delete. Raises MarlRayError if the run or the sweep is alive or unreadable."""
    owner = entry.owner()
    if owner is not None and owner.is_alive(time.time()):
        where = f"process {owner.pid} of {owner.host}"
        raise MarlRayError(f"{entry.kind} {entry.name!r} is alive in {where}; end it before you delete its folder")
    try:
        infos = entry.filesystem.get_file_info(fs.FileSelector(entry.folder, recursive=True))
    except OSError as error:
        raise MarlRayError(f"{entry.kind} {entry.name!r}: {entry.uri} cannot be read: {one_line(error)}") from error
    files = [info for info in infos if info.type == fs.FileType.File]
    size = sum(info.size or 0 for info in files)
    checkpoints = sum(info.base_name == MANIFEST_FILE for info in files)
    return FolderContents(entry.name, entry.uri, len(files), size, checkpoints, entry.mlflow_run_id)


def remove_folder(entry: StoredEntry) -> None:
    """Delete the folder of a run or a sweep.

    The folder is owned meanwhile, so that no driver begins in it. Raises MarlRayError if the run or the sweep is alive,
    if that cannot be told, or if the folder cannot be deleted.
    """
    contents_of(entry)
    label = f"{entry.kind} {entry.name!r}"
    with Lease(entry.filesystem, entry.folder, label):
        try:
            entry.filesystem.delete_dir(entry.folder)
        except OSError as error:
            raise MarlRayError(f"{label}: {entry.uri!r} cannot be deleted: {one_line(error)}") from error
