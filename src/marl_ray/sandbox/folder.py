"""The folder of the runs: emptied after each, watched where the file system does not limit its size."""

import contextlib
import itertools
import os
import stat


def empty(path: str) -> None:
    """Remove everything in a folder, however deep, whatever its modes; symlinks are never followed.

    Needs that nothing else works in the folder. Nested folders are first moved up: no recursion, no long paths.
    """
    with os.scandir(path) as entries:
        if not any(True for _ in entries):
            return
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    numbers = itertools.count()
    try:
        while names := os.listdir(root):
            for name in names:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=root).st_mode):
                    os.unlink(name, dir_fd=root)
                    continue
                os.chmod(name, 0o700, dir_fd=root)
                _move_up(root, name, numbers)
                os.rmdir(name, dir_fd=root)
    finally:
        os.close(root)


def remove(path: str) -> None:
    """Remove a folder and everything in it, as far as we may."""
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


def is_full(path: str, most_bytes: int, most_entries: int) -> bool:
    """Whether a folder holds more than it may. A folder too deep to look into counts as full."""
    used, count, todo = 0, 0, [path]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > most_entries or used > most_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except PermissionError:
            continue
        except OSError:
            return True
    return used > most_bytes
