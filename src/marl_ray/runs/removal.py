"""Deletes a run's folder, and says beforehand what is in it."""

import time
from dataclasses import dataclass

from pyarrow import fs

from marl_ray.errors import MarlRayError, one_line
from marl_ray.runs.stored import StoredRun
from marl_ray.runs.summary import checkpoints_of


@dataclass(frozen=True)
class RunContents:
    """The files that a run's folder holds."""

    name: str
    folder: str
    """Folder or URI."""
    files: int
    bytes: int
    checkpoints: int
    mlflow_run_id: str | None
    """The MLflow run, which stays, as do registered models."""


def contents_of(run: StoredRun) -> RunContents:
    """Count what `remove` would delete. Raises MarlRayError if the run is alive."""
    standing = run.standing()
    if standing is not None and standing.is_alive(time.time()):
        where = f"process {standing.pid} of {standing.host}"
        raise MarlRayError(f"run {run.name!r} is alive in {where}; end it before you delete its folder")
    infos = run.filesystem.get_file_info(fs.FileSelector(run.folder, recursive=True))
    files = [info for info in infos if info.type == fs.FileType.File]
    size = sum(info.size or 0 for info in files)
    checkpoints = len(checkpoints_of(run))
    return RunContents(run.name, run.uri, len(files), size, checkpoints, run.record.get("mlflow_run_id"))


def remove(run: StoredRun) -> None:
    """Delete the run's folder. Raises MarlRayError if the run is alive, or the folder cannot be deleted."""
    contents_of(run)
    try:
        run.filesystem.delete_dir(run.folder)
    except OSError as error:
        raise MarlRayError(f"run {run.name!r}: {run.uri!r} cannot be deleted: {one_line(error)}") from error
