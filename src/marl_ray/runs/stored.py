"""Finds the runs and sweeps of a storage by their folders."""

import contextlib
import glob
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pyarrow import fs
from typing_extensions import override

from marl_ray.errors import MarlRayError, did_you_mean, one_line
from marl_ray.json_types import JsonMapping
from marl_ray.stored_files.appended_file import parts_of
from marl_ray.stored_files.folder_kinds import RUN_FILE, RUN_KIND, SWEEP_FILE, SWEEP_KIND
from marl_ray.stored_files.ownership.owners import Owner, owner_numbers, read_owner
from marl_ray.stored_files.storages import open_storage
from marl_ray.training.run_folder.metrics_file import read_metrics
from marl_ray.training.run_folder.record import FINISHED_KEY, RunRecord, read_record
from marl_ray.tuning.folder import Folder
from marl_ray.tuning.records_file import CHANGES_FILE, read_records


class StoredRunState(StrEnum):
    """The states of a run."""

    STARTING = "starting"
    """Its driver works, and has not written a record yet."""
    RUNNING = "running"
    """Its driver works."""
    FINISHED = "finished"
    """It has played all the steps of its config."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """A person ended its driver."""
    DIED = "died"
    """Its driver ended without a word."""
    UNFINISHED = "unfinished"
    """Steps remain, and nothing says who played the others."""


@dataclass(frozen=True)
class StoredEntry:
    """The folder of a run or of a sweep."""

    kind: ClassVar[str]
    """`run`, `sweep`, `attempt` or `damaged`."""
    storage: str
    """Folder or URI, as the user named it."""
    name: str
    filesystem: fs.FileSystem
    folder: str
    """Path of the folder in the file system."""

    @property
    def uri(self) -> str:
        """The folder as users name it."""
        return f"{self.storage.rstrip('/')}/{self.name}"

    def owner(self) -> Owner | None:
        """Return the owner of the last attempt; None where no file names one."""
        return read_owner(self.filesystem, self.folder)

    @property
    def mlflow_run_id(self) -> str | None:
        """The id of its run in MLflow, of a sweep the parent run; None where it has none."""
        return None


@dataclass(frozen=True)
class StoredRun(StoredEntry):
    """One run's folder, and its record."""

    kind = RUN_KIND
    record: RunRecord
    """Content of `run.json`."""

    @property
    def config(self) -> JsonMapping:
        """The run's config as plain data with every default written out."""
        return self.record["config"]

    @property
    @override
    def mlflow_run_id(self) -> str | None:
        return self.record.get("mlflow_run_id") or None

    def state(self) -> StoredRunState:
        """Return the state of the run at this moment."""
        owner = self.owner()
        if owner is not None and owner.is_alive(time.time()):
            return StoredRunState.RUNNING
        finished = self.record.get(FINISHED_KEY)
        if finished is not None and finished["total_steps"] >= self.config["train"]["total_steps"]:
            return StoredRunState.FINISHED
        if owner is None:
            return StoredRunState.UNFINISHED
        return _end_of(owner)

    def rows(self) -> list[dict[str, float]]:
        """Return the metrics of its iterations. Raises MarlRayError for a file of other lines."""
        return read_metrics(self.filesystem, self.folder)

    def has(self, name: str) -> bool:
        """Return True if the folder has a file or a folder of this name."""
        return bool(self.filesystem.get_file_info(f"{self.folder}/{name}").type != fs.FileType.NotFound)


@dataclass(frozen=True)
class StoredSweep(StoredEntry):
    """One sweep's folder, and its records as plain data."""

    kind = SWEEP_KIND
    records: JsonMapping
    """Content of `sweep.json`, with the changes since."""
    changed: float
    """Time of the last change of the records, in seconds since 1970."""

    @property
    @override
    def mlflow_run_id(self) -> str | None:
        return self.records.get("mlflow_run_id") or None


@dataclass(frozen=True)
class StoredAttempt(StoredEntry):
    """The folder of a driver that has not written the record by which it would be a run's or a sweep's."""

    kind = "attempt"

    def state(self) -> StoredRunState:
        """Return the state of its driver at this moment."""
        owner = self.owner()
        if owner is None:
            return StoredRunState.DIED
        return StoredRunState.STARTING if owner.is_alive(time.time()) else _end_of(owner)

    def no_record(self) -> MarlRayError:
        """Return the error of a command that needs the record."""
        owner = self.owner()
        driver = "its driver" if owner is None else f"its driver, {owner.place},"
        if self.state() is StoredRunState.STARTING:
            return MarlRayError(f"{self.name!r} under {self.storage!r} has no record yet: {driver} is starting")
        return MarlRayError(
            f"{self.name!r} under {self.storage!r} has no record of a run or a sweep: {driver} has ended without one; "
            f"the same command begins it again, and `marl-ray runs rm {self.name}` deletes its folder"
        )


@dataclass(frozen=True)
class DamagedEntry(StoredEntry):
    """A folder whose record of a run or a sweep cannot be read."""

    kind = "damaged"
    error: MarlRayError
    """The error of each command that needs the record; it names the file."""


def _end_of(owner: Owner) -> StoredRunState:
    """Return the state that a driver has left which has not finished."""
    ended = owner.state in (StoredRunState.FAILED, StoredRunState.INTERRUPTED)
    return StoredRunState(owner.state) if ended else StoredRunState.DIED


def list_stored(storage: str) -> Iterator[StoredRun | StoredSweep | StoredAttempt | DamagedEntry]:
    """Yield the runs and sweeps of a storage, by name; a storage that is not there yet has none.

    A folder whose record cannot be read is a DamagedEntry. Raises MarlRayError if the storage cannot be read.
    """
    filesystem, root = open_storage(storage)
    for name in _folder_names(filesystem, root, storage):
        entry: StoredRun | StoredSweep | StoredAttempt | DamagedEntry | None
        try:
            entry = _read_entry(filesystem, root, storage, name)
        except MarlRayError as error:
            entry = DamagedEntry(storage, name, filesystem, f"{root}/{name}", error)
        if entry is not None:
            yield entry


def find_run(name: str, storage: str) -> StoredRun:
    """Return a run by its name under the storage, or by its folder.

    Raises MarlRayError with the names that are close, and for a folder that has no record of a run.
    """
    entry = find_entry(name, storage, "run", StoredRun)
    if isinstance(entry, StoredAttempt):
        raise entry.no_record()
    if isinstance(entry, StoredSweep):
        raise MarlRayError(f"{entry.name!r} is a sweep, expected a run; `marl-ray report {entry.name}` shows it")
    return entry


def find_entry(
    name: str, storage: str, what: str = "run or sweep", kind: type[StoredEntry] = StoredEntry
) -> StoredRun | StoredSweep | StoredAttempt:
    """Return a run or a sweep by its name under the storage, or by its folder.

    Raises MarlRayError with the names of this `kind` that are close; `what` is the kind in words.
    """
    parent, _, folder_name = name.rstrip("/").rpartition("/")
    storage, name = (parent, folder_name) if parent else (storage, name)
    filesystem, root = open_storage(storage)
    entry = _read_entry(filesystem, root, storage, name)
    if entry is None:
        stored_names = [stored.name for stored in list_stored(storage) if isinstance(stored, kind)]
        instead = did_you_mean(name, stored_names) if stored_names else storage_hint(storage) or f"; there is no {what}"
        raise MarlRayError(f"{what} {name!r} is not under {storage!r}{instead}")
    return entry


def storage_hint(storage: str) -> str:
    """Return the end of an error about a storage without runs: where there are some.

    The text names the storage of the newest run below the given one, such as that of `marl-ray try`. It is empty if
    there is no run below it.
    """
    if "://" in storage:
        return ""
    records: list[tuple[float, str]] = []
    for depth in ("*/*", "*/*/*"):
        pattern = f"{glob.escape(str(Path(storage)))}/{depth}/{RUN_FILE}"
        for path in glob.iglob(pattern, include_hidden=True):  # passes over folders that vanish
            with contextlib.suppress(OSError):
                records.append((os.stat(path).st_mtime, path))
    return f"; there are some in {Path(max(records)[1]).parent.parent}: name that storage" if records else ""


def folder_names(storage: str) -> list[str]:
    """Return the names of the folders of a storage, whatever lies in them. Raises MarlRayError if it cannot be read."""
    return _folder_names(*open_storage(storage), storage)


def _folder_names(filesystem: fs.FileSystem, root: str, storage: str) -> list[str]:
    try:
        infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    except (OSError, ValueError) as error:
        raise MarlRayError(f"storage: {storage!r} cannot be read: {one_line(error)}") from error
    return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)


def _read_entry(
    filesystem: fs.FileSystem, root: str, storage: str, name: str
) -> StoredRun | StoredSweep | StoredAttempt | None:
    """Return the run or the sweep of this name; None if there is none, and no driver has begun one.

    Raises MarlRayError for a file of something else.
    """
    folder = f"{root}/{name}"
    reason = f"{folder} has no record of a run"
    try:
        record = read_record(filesystem, folder)
        if record is not None:
            return StoredRun(storage, name, filesystem, folder, record)
        if filesystem.get_file_info(f"{folder}/{SWEEP_FILE}").type != fs.FileType.File:
            return StoredAttempt(storage, name, filesystem, folder) if owner_numbers(filesystem, folder) else None
        reason = f"{folder}/{SWEEP_FILE} is not the record of a sweep"
        records = read_records(Folder(storage, name))
        if records is not None:
            records["trials"], records["config"]  # a KeyError for other JSON
            files = filesystem.get_file_info([f"{folder}/{SWEEP_FILE}", f"{folder}/{CHANGES_FILE}"])
            if files[1].type == fs.FileType.Directory:
                files += parts_of(filesystem, files[1].path)
            changed = max((file.mtime.timestamp() for file in files if file.mtime), default=0.0)
            return StoredSweep(storage, name, filesystem, folder, records, changed)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MarlRayError(f"{reason}: {one_line(error)}") from error
    return None
