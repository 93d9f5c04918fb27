"""The drivers of a run or a sweep, the N-th in `NAME/owner/N.json`.

The file says whether the driver is alive, and how its attempt ended. The file with the greatest number is the owner's.
While a driver works, it writes the time into its file every BEAT_S seconds. The file also names its machine and
process, so that on that machine a driver that was killed is known at once.
"""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs

from marl_ray.stored_files.folder_kinds import OWNER_FOLDER
from marl_ray.stored_files.json_files import read_json
from marl_ray.temporary_folders import start_of

BEAT_S = 15.0
"""Seconds between two beats of a driver; it may miss three of them until it counts as dead."""
LOST_S = 60.0
"""Seconds without a beat after which a driver counts as dead, on whatever machine."""
RUNNING_STATE = "running"
"""State of an owner that has not ended."""


@dataclass(frozen=True)
class Owner:
    """The owner of a run: the driver of one attempt at it."""

    state: str
    """`running`, `finished`, `failed` or `interrupted`."""
    host: str
    address: str
    """IP address of the host; empty if it has none."""
    machine: str
    """Identifies the running system and its namespace of processes: hosts of one name may be several machines."""
    pid: int
    """Number of the driver's process on its machine."""
    began: int
    """Ticks from the machine's start to that of the process."""
    at: float
    """Time of the last beat, in seconds since 1970."""
    error: str | None = None
    """One line that says why the attempt failed."""

    def is_alive(self, now: float) -> bool:
        """Return True if the driver works; `now` is the time in seconds since 1970."""
        return self.state == RUNNING_STATE and not self.is_gone() and now - self.at < LOST_S

    def is_gone(self) -> bool:
        """Return True if its process was on this machine and is there no more."""
        return self.machine == this_machine() and start_of(self.pid) != self.began

    @property
    def place(self) -> str:
        """The process, as messages name it."""
        return f"process {self.pid} of {self.host}{f' ({self.address})' if self.address else ''}"


def read_owner(filesystem: fs.FileSystem, folder: str) -> Owner | None:
    """Return the last attempt at the run of this folder; None where nothing says so."""
    try:
        return owner_of(filesystem, folder, newest_number(filesystem, folder))
    except OSError:
        return None


def newest_number(filesystem: fs.FileSystem, folder: str) -> int:
    """Return the number of the folder's last owner; 0 if it never had one. Raises OSError."""
    return max(owner_numbers(filesystem, folder), default=0)


def owner_numbers(filesystem: fs.FileSystem, folder: str) -> list[int]:
    """Return the numbers of all owners that the folder names. Raises OSError."""
    infos = filesystem.get_file_info(fs.FileSelector(f"{folder}/{OWNER_FOLDER}", allow_not_found=True))
    stems = (info.base_name.removesuffix(".json") for info in infos if info.base_name.endswith(".json"))
    return [int(stem) for stem in stems if stem.isdecimal()]


def owner_of(filesystem: fs.FileSystem, folder: str, number: int) -> Owner | None:
    """Return the owner of this number.

    Return None if its file is not there, is being written, or holds no owner.
    """
    try:
        data = read_json(filesystem, owner_file(folder, number))
        return None if data is None else Owner(**data)
    except (OSError, ValueError, TypeError):
        return None


def owner_file(folder: str, number: int) -> str:
    """Return the path of the file of the owner of this number."""
    return f"{folder}/{OWNER_FOLDER}/{number}.json"


@functools.cache
def this_machine() -> str:
    """Return the boot of this system and this process's namespace of processes.

    Two containers share the first, and two machines the number of the second.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def whose_folder(filesystem: fs.FileSystem, folder: str) -> str:
    """Return a text that tells a folder from all others, also from one that has its path on another machine."""
    return f"{this_machine()} {folder}" if isinstance(filesystem, fs.LocalFileSystem) else folder


@functools.cache
def own_address() -> str:
    """Return the address by which other machines reach this one.

    The address is empty without a network. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that is nobody's
            return str(probe.getsockname()[0])
        except OSError:
            return ""
