"""Folders of workers: locked by their owner, and removed by the next pool if that was killed."""

import contextlib
import fcntl
import os
import tempfile

from marl_ray.sandbox.confinement import run_folder

_PREFIX = "marl-ray-sandbox."


def create_locked_folder() -> tuple[str, int]:
    """Create a folder, and return its path and a descriptor that locks it.

    While the descriptor is open, no process removes the folder as forgotten.
    """
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        # In a file system without locks no other process gets one either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have removed the folder before this one locked it.
        with contextlib.suppress(FileNotFoundError):
            os.chmod(path, 0o711)  # runs execute as another user, who must pass through
            return path, lock
        os.close(lock)


def remove_forgotten_folders() -> None:
    """Remove the folders of this user whose owner was killed before it could."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(_PREFIX):
            continue
        # The folder may be another user's, in use, or just removed.
        with contextlib.suppress(OSError):
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    run_folder.remove(entry.path)
            finally:
                os.close(lock)
