"""The files of a checkpoint as torch's writer and reader of distributed checkpoints take them."""

import io
import json
import os
import pickle
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from marl_ray.errors import one_line
from marl_ray.stored_files.durability import create_folder
from marl_ray.training.checkpoints.storage import (
    DamagedCheckpointError,
    HashedStream,
    StoredFile,
    StoredFolder,
    UnwritableCheckpointError,
    read_verified,
)

INDEX = ".metadata"
"""torch's name for the file that says which tensor lies where."""


class StoredFiles(FileSystemBase):
    """Reads and writes the files in a checkpoint's folder.

    Paths are relative to the folder. Files that were written are in `written`; those read must be as `stored` says.
    """

    def __init__(self, place: StoredFolder, stored: Mapping[str, StoredFile] | None = None):
        self.place, self.stored = place, stored or {}
        self.written: dict[str, StoredFile] = {}
        self.folders: set[str] = set()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file. Raises UnwritableCheckpointError or DamagedCheckpointError, which name it."""
        name = str(path)
        if "r" in mode:
            yield io.BytesIO(self.read(name))
            return
        place, stream = self.place / name, None
        try:
            parent = place.path.rpartition("/")[0]
            if parent not in self.folders:
                create_folder(place.filesystem, parent)
                self.folders.add(parent)
            stream = HashedStream(place)
            yield cast(io.IOBase, stream)
            stream.close()
        except Exception as error:
            cause = error if stream is None else stream.error or error
            raise UnwritableCheckpointError(f"{place} cannot be written: {one_line(cause)}") from error
        self.written[name] = StoredFile(stream.size, stream.digest.hexdigest())

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file. Raises UnwritableCheckpointError."""
        with self.create_stream(name, "wb") as stream:
            stream.write(data)

    def copy_in(self, folder: Path, name: str) -> None:
        """Write the files of a local folder under `name`. Raises UnwritableCheckpointError."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as source, self.create_stream(f"{name}/{path.relative_to(folder)}", "wb") as target:
                while data := source.read(1 << 20):
                    target.write(data)

    def read(self, name: str) -> bytes:
        """Return the contents of a file. Raises DamagedCheckpointError, which names it, or OSError."""
        if name not in self.stored:
            raise DamagedCheckpointError(f"{self.place / name} is not in the manifest")
        return read_verified(self.place / name, self.stored[name])

    def read_json(self, name: str) -> Any:
        """Return plain data of a file. Raises as `read` does."""
        return json.loads(self.read(name))

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: folders are made with the first file in them."""

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # the folder of a checkpoint is new

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("files of a checkpoint keep their names")

    @override
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError("files of a checkpoint are removed with their folder")

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class TensorWriter(FileSystemWriter):
    """Writes this rank's tensors into a subfolder; rank 0 writes the index of all."""

    def __init__(self, files: StoredFiles, folder: str):
        super().__init__(folder, sync_files=False)
        self.fs: Any = files
        self.path: Any = folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index. No move makes it complete, because the manifest that publishes the checkpoint names it."""
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        self.fs.write(f"{self.path}/{INDEX}", pickle.dumps(metadata))


class TensorReader(FileSystemReader):
    """Reads the tensors that this rank needs."""

    def __init__(self, files: StoredFiles, folder: str):
        super().__init__(folder)
        self.fs: Any = files
        self.path: Any = folder
        self.index: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the index, which is read once. Raises DamagedCheckpointError or OSError."""
        if self.index is None:
            self.index = super().read_metadata(*args, **kwargs)
        return self.index
