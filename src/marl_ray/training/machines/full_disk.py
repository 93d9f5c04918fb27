"""Recognise that a disk is full, and name it. Starting again makes no room, so such a run ends at once."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator

from marl_ray.errors import MarlRayError, describe_error

FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a quota that is used up."""
FULL_TEXTS = ("no space left on device", "disk is full", "disk quota exceeded")
"""Words of libraries whose errors have no number: safetensors, SQLite, torch."""
MIN_FREE_BYTES = 1 << 20
"""Bytes; a disk with fewer of them free counts as full. What a run writes at a time is larger."""


class DiskFullError(MarlRayError):
    """There is no room for a file of the run."""


def find_full_disk(error: BaseException, storage: str) -> DiskFullError | None:
    """Return the error that names the full disk, if that caused `error`; None otherwise.

    `storage` is a path or a URI.
    """
    if not any(_is_full(cause) for cause in _walk_causes(error)):
        return None
    folders = [path for path in (storage, tempfile.gettempdir(), os.getcwd()) if os.path.isdir(path)]
    full = list(dict.fromkeys(path for path in folders if shutil.disk_usage(path).free < MIN_FREE_BYTES))
    where = f"the disk of {' and of '.join(full)} is full" if full else "a disk is full, or a quota is used up"
    return DiskFullError(f"{where}, and the same command continues when there is room ({describe_error(error)})")


def _is_full(error: BaseException) -> bool:
    """Return True if an error is one of a full disk."""
    return getattr(error, "errno", None) in FULL_NUMBERS or any(text in str(error).lower() for text in FULL_TEXTS)


def _walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes, each once, because causes may form a circle."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
