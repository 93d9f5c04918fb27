"""Opens storages, which are folders of a machine and URIs that pyarrow knows, such as `s3://bucket/runs`."""

from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from marl_ray.errors import MarlRayError, one_line


def absolute_storage(storage: str) -> str:
    """Return a storage as a URI or an absolute path."""
    return storage if "://" in storage else str(Path(storage).resolve())


def open_storage(storage: str, key: str = "storage") -> tuple[fs.FileSystem, str]:
    """Return the file system of a folder or URI, which need not exist, and its path without a slash at its end.

    Raises MarlRayError that names the config's `key`, also for a URI without a bucket.
    """
    try:
        filesystem, path = fs.FileSystem.from_uri(absolute_storage(storage))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MarlRayError(f"{key}: {storage!r} cannot be used: {one_line(error)}") from error
    if not path:
        raise MarlRayError(f"{key}: {storage!r} cannot be used: it names no bucket")
    return filesystem, path.rstrip("/")
