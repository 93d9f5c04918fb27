"""Brings local files and folders onto the disk, so that they outlast a loss of power.

The disk gets the bytes of a file and its name apart: fsync of the file brings the bytes, fsync of its folder the name.
"""

import errno
import os
from pathlib import Path

from pyarrow import fs


def sync_to_disk(path: str | Path) -> None:
    """Bring the bytes of a local file, or the names in a local folder, onto the disk. Raises OSError.

    Where a file system knows no fsync of folders, such as some network storages, their names are as lasting as it is.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): the file is of a kind that cannot be synced
            raise
    finally:
        os.close(descriptor)


def create_folder(filesystem: fs.FileSystem, path: str) -> None:
    """Create a folder and those above it, unless they exist; on a local disk their names outlast a loss of power.

    Raises OSError.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        create_local_folder(Path(path))
    else:
        filesystem.create_dir(path)


def create_local_folder(path: Path) -> None:
    """Create a folder of this machine as `create_folder` does. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_to_disk(folder.parent)
