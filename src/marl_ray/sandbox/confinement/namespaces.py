"""Namespaces of a server and its runs, and the file systems that they see there."""

import contextlib
import os

from marl_ray.sandbox.confinement import kernel
from marl_ray.sandbox.confinement.readable_paths import needed_paths
from marl_ray.sandbox.confinement.run_folder import MAX_FOLDER_BYTES, MAX_FOLDER_ENTRIES

_NAMESPACES = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_PROC_OPTIONS = "subset=pid,hidepid=4"
"""Options of /proc: a run sees its own processes; Landlock lets it open nothing there but its own pipes and files."""


def enter_namespaces() -> None:
    """Enter new namespaces for this process and, for process ids, its children.

    A process without privileges goes through a user namespace. The mount namespace comes later, for the server alone,
    because this process must still remove the folder from the host's file system. Raises OSError if the host refuses.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        kernel.unshare(_NAMESPACES)
    except PermissionError:
        kernel.unshare(kernel.CLONE_NEWUSER | _NAMESPACES)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def mount_file_systems(base: str, run_folder: str, uid: int | None) -> None:
    """Enter a mount namespace, and mount there the file systems of the runs.

    All are read-only but `run_folder`, whose size is limited: the host's, an empty /sys, /run and shared memory, and a
    /proc of the runs alone. The worker's folder `base` stays in sight. Raises OSError if the host refuses.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.make_mounts_read_only()
    _reopen_path([*needed_paths(), base], uid)
    mount_run_folder(run_folder, uid)
    for path in ("/sys", "/run", "/dev/shm", "/proc"):
        if os.path.isdir(path) and not base.startswith(path + "/"):
            if path == "/proc":
                # A host that hides parts of its /proc allows no other one.
                with contextlib.suppress(OSError):
                    kernel.mount("proc", path, kernel.MS_RDONLY, _PROC_OPTIONS)
                    continue
            kernel.mount("tmpfs", path, kernel.MS_RDONLY, "size=4k,mode=755")


def mount_run_folder(path: str, uid: int | None) -> None:
    """Mount an empty file system of limited size, which belongs to the user `uid`, or to this process's own."""
    owner = os.geteuid() if uid is None else uid
    group = os.getegid() if uid is None else uid
    options = f"mode=700,uid={owner},gid={group},size={MAX_FOLDER_BYTES},nr_inodes={MAX_FOLDER_ENTRIES}"
    kernel.mount("tmpfs", path, 0, options)


def _reopen_path(needed: list[str], uid: int | None) -> None:
    """Make one path readable at the same place, if it is needed and another user could not reach it.

    An interpreter below /root is such a path.
    """
    if uid is None:
        return
    for path in needed:
        parents = [*reversed([path[:i] for i, letter in enumerate(path) if letter == "/" and i])]
        closed = next((parent for parent in reversed(parents) if not os.stat(parent).st_mode & 0o001), None)
        if closed is None:
            continue
        below = [item for item in needed if item.startswith(closed + "/")]
        fds = [(item, os.open(item, os.O_PATH | os.O_CLOEXEC)) for item in below]
        kernel.mount("tmpfs", closed, 0, "size=1m,mode=755")
        for item, fd in fds:
            os.makedirs(item, exist_ok=True)
            kernel.bind_mount(fd, item)
            os.close(fd)
