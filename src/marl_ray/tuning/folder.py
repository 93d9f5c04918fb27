"""Files of a sweep under its storage, local or remote: JSON and safetensors, never a pickle.

NAME/sweep.json, NAME/sweep.jsonl     records of all trials, and their changes since, written by the sweep's driver
NAME/report.html, NAME/winner.yaml    the report, and the winner's run config
NAME/trials/0003/trial.json           what the trial has, written by its process; the driver writes while it waits
NAME/trials/0003/rows.jsonl           metrics, a row per iteration, appended by the trial's process
NAME/trials/0003/attempt-1/checkpoint-000010/   seed-0/, seed-1/, ...: a checkpoint of each seed
NAME/trials/0003/bundles/seed-0/      the best bundle of each seed
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

from marl_ray.errors import MarlRayError
from marl_ray.json_types import JsonValue
from marl_ray.stored_files.appended_file import AppendedFile, appended_file, lines_of
from marl_ray.stored_files.durability import create_folder
from marl_ray.stored_files.json_files import read_json, write_json
from marl_ray.stored_files.storages import absolute_storage, open_storage
from marl_ray.stored_files.temporary_files import write_file
from marl_ray.temporary_folders import temporary_folder
from marl_ray.training.run_folder.metrics_file import row_of

ROWS_FILE = "rows.jsonl"
"""File of a trial's metrics, a row per iteration."""


class Folder:
    """A folder of plain files on any storage. Errors of the storage are raised as OSError."""

    def __init__(self, storage: str, *parts: str):
        """Open the folder. Raises MarlRayError if the storage cannot be used at all."""
        self.filesystem, root = open_storage(storage)
        self.path = "/".join([root, *parts])
        self.uri = "/".join([absolute_storage(storage).rstrip("/"), *parts])
        """The folder in the form that Ray takes."""

    @property
    def is_local(self) -> bool:
        """True if the folder is on a file system of this machine."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def exists(self, name: str) -> bool:
        """Return True if a file or a folder of this name is in it."""
        return bool(self._kind(name) != fs.FileType.NotFound)

    def _kind(self, name: str) -> object:
        return self.filesystem.get_file_info(f"{self.path}/{name}").type

    def folders(self, name: str = "") -> list[str]:
        """Return the names of the folders in it, or in its folder `name`, in alphabetical order.

        The list is empty where that folder is not there, or cannot be listed.
        """
        place = f"{self.path}/{name}".rstrip("/")
        try:
            infos = self.filesystem.get_file_info(fs.FileSelector(place, allow_not_found=True))
        except OSError:
            return []
        return sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)

    def read_json(self, name: str) -> JsonValue:
        """Return the contents of a JSON file; None if there is no such file."""
        return read_json(self.filesystem, f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError where there is none."""
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, data: bytes) -> None:
        """Write a file, and the folder that it lies in: readers see it as it was before or complete."""
        write_file(self.filesystem, self._path_in_folder(name), data, durable=True)

    def open_lines(self, name: str) -> AppendedFile:
        """Return a file of lines, to be continued or begun."""
        return appended_file(self.filesystem, self._path_in_folder(name))

    def lines(self, name: str) -> list[str]:
        """Return the complete lines of such a file; empty where there is none."""
        return lines_of(self.filesystem, f"{self.path}/{name}")

    def write_json(self, name: str, data: object) -> None:
        """Write plain data as `write` does. Raises TypeError for data that JSON does not know."""
        write_json(self.filesystem, self._path_in_folder(name), data, durable=True)

    def _path_in_folder(self, name: str) -> str:
        """Return the path of a file of this name, after making the folder that it lies in."""
        path = f"{self.path}/{name}"
        create_folder(self.filesystem, path.rpartition("/")[0])
        return path

    def upload(self, local: Path, name: str) -> None:
        """Copy a local folder with all in it to a folder of this name.

        Files that are there already stay, unless they have the name of a copied one.
        """
        self.filesystem.create_dir(f"{self.path}/{name}")
        fs.copy_files(str(local), f"{self.path}/{name}", fs.LocalFileSystem(), self.filesystem, use_threads=False)

    def upload_file(self, local: Path, name: str) -> None:
        """Copy a local file to a file of this name, as `write` does."""
        self.write(name, local.read_bytes())

    def copy_from(self, other: "Folder", source: str, name: str) -> None:
        """Copy a folder of another trial of the same sweep; a folder of that name here is replaced."""
        self.remove(name)
        self.filesystem.create_dir(f"{self.path}/{name}")
        fs.copy_files(
            f"{other.path}/{source}", f"{self.path}/{name}", self.filesystem, self.filesystem, use_threads=False
        )

    def remove(self, name: str) -> None:
        """Remove the folder of this name with all in it; does nothing where there is none."""
        if self._kind(name) == fs.FileType.Directory:
            self.filesystem.delete_dir(f"{self.path}/{name}")

    @contextmanager
    def local(self, name: str | None) -> Iterator[Path | None]:
        """Yield a local copy of a folder, or the folder itself if it is local; None for the name None."""
        if name is None:
            yield None
        elif self.is_local:
            yield Path(self.path, name)
        else:
            with temporary_folder("checkpoint") as temporary:
                fs.copy_files(f"{self.path}/{name}", str(temporary), self.filesystem, fs.LocalFileSystem())
                yield temporary


def trial_folder(storage: str, sweep: str, number: int) -> Folder:
    """Return the folder of a trial.

    The folder is named by the trial's number, so any process that runs the trial finds its files.
    """
    return Folder(storage, sweep, "trials", f"{number:04d}")


def read_rows(folder: Folder) -> list[dict[str, float]]:
    """Return the rows of metrics in a trial's folder.

    Raises OSError, and MarlRayError, which names file and line, for lines that are no rows.
    """
    rows = []
    for number, line in enumerate(folder.lines(ROWS_FILE), 1):
        row = row_of(line)
        if row is None:
            raise MarlRayError(f"{folder.uri}/{ROWS_FILE}, line {number}: expected a row of metrics as a JSON object")
        rows.append(row)
    return rows
