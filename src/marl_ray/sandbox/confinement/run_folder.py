"""Folders for runs: each run has one that no earlier run has touched."""

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Callable

REMOVE_S = 2.0
"""Seconds that removing a run's files may take before the next run; what is left is removed before the run after it."""
MAX_FOLDER_BYTES = 256 << 20
"""Maximum size of a run's folder: four files of the largest size that `Limits` allows by default."""
MAX_FOLDER_ENTRIES = 4096
"""Maximum number of files and folders in a run's folder, which must be removed before the next run."""


class MountedFolder:
    """A file system of its own, which a run may own.

    It is replaced once a run has touched it, so that its inodes are counted anew.
    """

    def __init__(self, path: str, replace: Callable[[], None]):
        """`replace` mounts an empty file system at the same path."""
        self.path, self._replace = path, replace
        self._attributes = _read_attributes(path)

    def renew(self) -> bool:
        """Replace the file system if a run has touched it. Return True if it was replaced."""
        if _is_untouched(self.path, self._attributes):
            return False
        self._replace()
        self._attributes = _read_attributes(self.path)
        return True


class NumberedFolders:
    """Folders below a parent that runs may only pass through.

    A folder that a run has touched is moved aside and removed. Runs of this process's own user must not be able to
    change modes, or they could open the parent.
    """

    def __init__(self, base: str, owner: int | None):
        """Make the first folder, below `base`, through which runs may only pass too.

        `owner` is the user id to whom the runs' folders belong; None for that of this process.
        """
        self.parent, self._aside = os.path.join(base, "runs"), os.path.join(base, "aside")
        self._owner, self._numbers = owner, itertools.count()
        self._closed_mode = 0o100 if owner is None else 0o711
        os.mkdir(self.parent, 0o700)
        os.mkdir(self._aside, 0o700)
        self._make()

    def _make(self) -> None:
        self.path = os.path.join(self.parent, str(next(self._numbers)))
        os.chmod(self.parent, 0o700)
        os.mkdir(self.path, 0o700)
        if self._owner is not None:
            os.chown(self.path, self._owner, self._owner)
        os.chmod(self.parent, self._closed_mode)
        self._attributes = _read_attributes(self.path)

    def renew(self) -> bool:
        """Switch to another folder unless the present one is untouched.

        Return False, because nothing is mounted anew: the rules name the parent, which stays.
        """
        if _is_untouched(self.path, self._attributes):
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be moved stays, and no later run uses its name
            os.chmod(self.path, 0o700)  # moving a folder rewrites its `..`
            os.chmod(self.parent, 0o700)
            os.rename(self.path, os.path.join(self._aside, os.path.basename(self.path)))
        self._make()
        with contextlib.suppress(OSError):
            empty(self._aside, time.monotonic() + REMOVE_S)
        return False


def _read_attributes(path: str) -> tuple[int, ...]:
    """Return the attributes by which one sees that a run has changed or replaced a folder."""
    stat_ = os.stat(path)
    return (
        stat_.st_ino,
        stat_.st_mode,
        stat_.st_uid,
        stat_.st_gid,
        stat_.st_nlink,
        stat_.st_mtime_ns,
        stat_.st_ctime_ns,
    )


def _is_untouched(path: str, attributes: tuple[int, ...]) -> bool:
    """Return True if a folder is empty and its attributes are unchanged."""
    try:
        return _read_attributes(path) == attributes and not os.listdir(path)
    except OSError:
        return False


def empty(path: str, deadline: float = float("inf")) -> None:
    """Remove everything in a folder, however deep, whatever its modes; symlinks are never followed.

    Nothing else may work in the folder meanwhile. Nested folders are first moved up: no recursion, no long paths.
    Raises OSError for an entry that cannot be removed, TimeoutError when the deadline (of the monotonic clock) passes.
    """
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    numbers = itertools.count()
    try:
        while names := os.listdir(root):
            for name in names:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}: too much to remove")
                if not stat.S_ISDIR(os.lstat(name, dir_fd=root).st_mode):
                    os.unlink(name, dir_fd=root)
                    continue
                os.chmod(name, 0o700, dir_fd=root)
                _move_up(root, name, numbers)
                os.rmdir(name, dir_fd=root)
    finally:
        os.close(root)


def remove(path: str) -> None:
    """Remove a folder and everything in it, as far as permissions allow."""
    with contextlib.suppress(OSError):
        empty(path)
        os.rmdir(path)


def _move_up(root: int, name: str, numbers: "itertools.count[int]") -> None:
    """Delete the files of a sub-folder and move its folders beside it."""
    sub = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        for item in os.listdir(sub):
            if not stat.S_ISDIR(os.lstat(item, dir_fd=sub).st_mode):
                os.unlink(item, dir_fd=sub)
                continue
            os.chmod(item, 0o700, dir_fd=sub)  # moving a folder rewrites its `..`
            while True:
                target = f"{next(numbers)}.moved"
                with contextlib.suppress(FileNotFoundError):
                    os.lstat(target, dir_fd=root)
                    continue
                break
            os.rename(item, target, src_dir_fd=sub, dst_dir_fd=root)
    finally:
        os.close(sub)


def is_full(path: str, max_bytes: int, max_entries: int) -> bool:
    """Return True if a folder holds more than it may.

    A folder that cannot be read, or is too deep for that, counts as full.
    """
    used, count, todo = 0, 0, [path]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > max_entries or used > max_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return used > max_bytes
