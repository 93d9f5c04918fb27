"""Temporary folders that name the process that made them, so that those of killed processes are removed."""

import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

FOLDER_NAME = re.compile(r"marl-ray-[a-z-]+-([0-9a-f]{8})-([0-9]+)-([0-9]+)-[^-]+")
"""Name of a folder: purpose; machine; process and its start, in ticks since the machine's start; a random end."""
SHORT_NAME = re.compile(r"mr-[0-9a-f]{8}")
"""Name of a folder whose path must be short. The folder's file MAKER_FILE holds the name that it would have else."""
MAKER_FILE = "maker"
"""File of a folder of SHORT_NAME."""


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield an empty folder under the system's temporary folder, which is deleted after the block.

    `purpose` is one word of its name.
    """
    folder = new_temporary_folder(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_temporary_folder(purpose: str) -> Path:
    """Return an empty folder under the system's temporary folder.

    Whoever makes it deletes it; if this process is killed, the next one that makes a folder does.
    """
    remove_leftovers(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=_name_prefix(purpose)))


def object_folder(purpose: str, max_root: int | None = None) -> tempfile.TemporaryDirectory[str]:
    """Return an empty folder that is deleted with the returned object.

    The folder is in /tmp where the path of the system's temporary folder has more than `max_root` characters.
    """
    root = tempfile.gettempdir()
    if max_root is not None and len(root) > max_root:
        root = "/tmp"
    remove_leftovers(root)
    return tempfile.TemporaryDirectory(prefix=_name_prefix(purpose), dir=root)


def short_folder(purpose: str, root: str) -> Path:
    """Return an empty folder under `root` whose name has eleven characters, such as for Unix sockets.

    Whoever makes it deletes it; its file MAKER_FILE names the process, so that it is removed as those of
    `new_temporary_folder` are.
    """
    remove_leftovers(root)
    folder = Path(tempfile.mkdtemp(prefix=_name_prefix(purpose), dir=root))
    (folder / MAKER_FILE).write_text(folder.name)
    return folder.rename(Path(root, f"mr-{secrets.token_hex(4)}"))


def _name_prefix(purpose: str) -> str:
    pid = os.getpid()
    return f"marl-ray-{purpose}-{_machine()}-{pid}-{start_of(pid)}-"


@cache
def remove_leftovers(root: str) -> None:
    """Delete the folders under `root` whose processes, of this machine, have ended."""
    try:
        names = os.listdir(root)
    except OSError:
        return
    for name in names:
        match = FOLDER_NAME.fullmatch(_read_maker(Path(root, name)) if SHORT_NAME.fullmatch(name) else name)
        if match is not None and match[1] == _machine() and start_of(int(match[2])) != int(match[3]):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _read_maker(folder: Path) -> str:
    """Return the content of a short folder's file; empty where it cannot be read."""
    try:
        return (folder / MAKER_FILE).read_text(errors="replace")
    except OSError:
        return ""


@cache
def _machine() -> str:
    """Return a digest of this boot of the system and of the namespace in which the numbers of its processes count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
    except OSError:  # not Linux, where no process's start is known and every folder stays
        return "0" * 8


def start_of(process: int) -> int:
    """Return the ticks from the machine's start to that of a process; 0 if there is no such process.

    No change of the clock moves them. A process that has ended counts as none, even if its parent has not waited for it.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat.rpartition(b")")[2].split()  # proc(5): from the third on, after a name that may hold any bytes
    return 0 if fields[0] == b"Z" else int(fields[19])
