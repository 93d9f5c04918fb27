"""Writes files beside their place and moves them there, and removes those that killed processes left."""

import contextlib
import os
import re
from pathlib import Path

from pyarrow import fs

from marl_ray.stored_files.durability import sync_to_disk

TEMPORARY_NAME = re.compile(r"\..+\.[0-9]+")
"""Name of a temporary file: that of its place, between a dot and the number of its writer."""


def temporary_path(path: str, writer: int | None = None) -> str:
    """Return the path at which a writer writes the file that belongs at `path`, in the same folder.

    The writer is by default this process.
    """
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.{os.getpid() if writer is None else writer}"


def write_complete(filesystem: fs.FileSystem, path: str, data: bytes, writer: int | None = None) -> None:
    """Write a file that readers see as it was before or complete.

    `writer` tells apart those that write it at once. Raises OSError.
    """
    temporary = temporary_path(path, writer)
    try:
        with filesystem.open_output_stream(temporary) as stream:
            stream.write(data)
        filesystem.move(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            filesystem.delete_file(temporary)
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a local file as `write_complete` does, such that its bytes and its name outlast a loss of power too.

    The result is another file than the one that was there. Raises OSError.
    """
    temporary = Path(temporary_path(str(path)))
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(filesystem: fs.FileSystem, path: str, data: bytes, durable: bool = False) -> None:
    """Write a file that readers see as it was before or complete; an object store does so by itself.

    On a local disk, a `durable` one outlasts a loss of power too. Raises OSError.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        if durable:
            replace_file(Path(path), data)
        else:
            write_complete(filesystem, path, data)
        return
    with filesystem.open_output_stream(path) as stream:
        stream.write(data)


def remove_temporary(filesystem: fs.FileSystem, folder: str) -> None:
    """Remove the temporary files of a folder.

    A process that is about to move one gets an OSError, so only the folder's owner may do it.
    """
    with contextlib.suppress(OSError):  # they disturb nobody
        for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
            if TEMPORARY_NAME.fullmatch(info.base_name):
                with contextlib.suppress(OSError):
                    filesystem.delete_file(info.path)
