"""Files on any storage.

They are written with their hashes, and read only if size and hash are right.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import fs

from marl_ray.errors import MarlRayError
from marl_ray.stored_files.durability import sync_to_disk

CHUNK = 2**20
"""Bytes that are read and hashed at a time."""


class UnwritableCheckpointError(MarlRayError):
    """The error of a checkpoint that cannot be written, for example on a full disk. Another try would meet it again."""


class DamagedCheckpointError(MarlRayError):
    """The error of a checkpoint's file that is missing, or is not what was written."""


class StoredFile(NamedTuple):
    """The size and hash by which a file is recognised."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digits."""


class StoredFolder(NamedTuple):
    """A folder on a storage."""

    filesystem: fs.FileSystem
    path: str

    def __truediv__(self, name: str) -> "StoredFolder":
        return StoredFolder(self.filesystem, f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.path

    @property
    def is_local(self) -> bool:
        """True if it lies on a file system of this machine, where other libraries can open its files by their paths."""
        return isinstance(self.filesystem, fs.LocalFileSystem)


def local_stored_folder(folder: Path) -> StoredFolder:
    """Return a folder of this machine."""
    return StoredFolder(fs.LocalFileSystem(), str(folder.absolute()))


class HashedStream:
    """Writes a file, and hashes what is written."""

    def __init__(self, place: StoredFolder):
        self.place, self.size, self.digest = place, 0, hashlib.sha256()
        self.error: Exception | None = None
        self.file: Any = place.filesystem.open_output_stream(place.path)

    def write(self, data: Any) -> int:
        """Write bytes or a buffer, and return how many bytes they were. An error is kept in `error` and raised."""
        view = memoryview(data).cast("B")
        try:
            self.file.write(view)
        except Exception as error:  # torch's serialiser may hide the error behind one of its own
            self.error = error
            raise
        self.digest.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.size

    def flush(self) -> None:
        """Do nothing: `close` brings all bytes to the storage."""

    def close(self) -> None:
        """Close the file, and on a local disk wait until its bytes and its name are durable.

        A second call does nothing. Raises OSError.
        """
        if self.file.closed:
            return
        self.file.close()
        if self.place.is_local:
            sync_to_disk(self.place.path)
            sync_to_disk(Path(self.place.path).parent)


def read_file(place: StoredFolder) -> bytes | None:
    """Return the contents of a file; None where there is none. Raises OSError."""
    try:
        with place.filesystem.open_input_stream(place.path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        return None


def read_verified(place: StoredFolder, expected: StoredFile) -> bytes:
    """Return the contents of a file that must be as it was written.

    Raises DamagedCheckpointError, which names the file, or OSError.
    """
    data = read_file(place)
    if data is None:
        raise DamagedCheckpointError(f"{place} is missing")
    _compare(place, expected, len(data), hashlib.sha256(data).hexdigest())
    return data


def check_size(place: StoredFolder, expected: StoredFile) -> None:
    """Raise DamagedCheckpointError if a file is not there in its size, or OSError."""
    info = place.filesystem.get_file_info(place.path)
    if info.type != fs.FileType.File:
        raise DamagedCheckpointError(f"{place} is missing")
    _compare(place, expected, info.size, expected.sha256)


def check_content(place: StoredFolder, expected: StoredFile) -> None:
    """Raise as `read_verified` does if a file is not as it was written.

    Its contents need not fit into memory.
    """
    size, digest = 0, hashlib.sha256()
    try:
        with place.filesystem.open_input_stream(place.path) as stream:
            while data := stream.read(CHUNK):
                size += len(data)
                digest.update(data)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{place} is missing") from None
    _compare(place, expected, size, digest.hexdigest())


def _compare(place: StoredFolder, expected: StoredFile, size: int, sha256: str) -> None:
    """Raise DamagedCheckpointError if size or hash are not those of the file that was written."""
    if size != expected.size:
        raise DamagedCheckpointError(f"{place} has {size:,} bytes, expected {expected.size:,}")
    if sha256 != expected.sha256:
        raise DamagedCheckpointError(f"{place} has another content than was written: its sha256 differs")
