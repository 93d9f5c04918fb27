"""`NAME/state.json`: whether the driver of a run is alive, and how its last attempt ended.

While a driver works, it writes the time into the file every BEAT_S seconds. It also names its machine and process, so that
on that machine a driver that was killed is known at once.
"""

import contextlib
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType

import psutil
from pyarrow import fs

from marl_ray.errors import named
from marl_ray.training.run_folder.record import read_json, write_json

STATE = "state.json"
"""Name of the file in a run's folder."""
BEAT_S = 15.0
LOST_S = 60.0
"""Seconds without a beat after which a driver on another machine counts as dead."""
RUNNING = "running"


@dataclass(frozen=True)
class Standing:
    """The last attempt at a run."""

    state: str
    """`running`, `finished`, `failed` or `interrupted`."""
    host: str
    pid: int
    began: float
    """Time at which the process began, in seconds since 1970."""
    at: float
    """Time of the last beat, in seconds since 1970."""
    error: str | None = None
    """One line that says why the attempt failed."""

    def is_alive(self, now: float) -> bool:
        """True if the driver works; `now` is the time in seconds since 1970."""
        if self.state != RUNNING:
            return False
        if self.host != socket.gethostname():
            return now - self.at < LOST_S
        return psutil.pid_exists(self.pid) and _began(self.pid) == self.began


class Beating:
    """Keeps the file of the run's `folder`, which exists, while a block runs."""

    def __init__(self, filesystem: fs.FileSystem, folder: str):
        self.filesystem, self.path = filesystem, f"{folder}/{STATE}"
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="state", daemon=True)

    def __enter__(self) -> None:
        self._write(RUNNING)
        self.thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()
        self.thread.join(BEAT_S)
        if error is None:
            self._write("finished")
        elif isinstance(error, Exception):
            self._write("failed", named(error))
        else:  # Ctrl-C, or an exit
            self._write("interrupted")

    def _beat(self) -> None:
        while not self.done.wait(BEAT_S):
            self._write(RUNNING)

    def _write(self, state: str, error: str | None = None) -> None:
        pid = os.getpid()
        standing = Standing(state, socket.gethostname(), pid, _began(pid), time.time(), error)
        with contextlib.suppress(OSError):  # a run goes on whose state cannot be written
            if not isinstance(self.filesystem, fs.LocalFileSystem):
                write_json(self.filesystem, self.path, asdict(standing))
                return
            write_json(self.filesystem, f"{self.path}.new", asdict(standing))
            self.filesystem.move(f"{self.path}.new", self.path)  # a reader sees the old file or the new one


def read_standing(filesystem: fs.FileSystem, folder: str) -> Standing | None:
    """The last attempt at the run of this folder; None where nothing says so."""
    try:
        data = read_json(filesystem, f"{folder}/{STATE}")
        return None if data is None else Standing(**data)
    except (OSError, ValueError, TypeError):  # it is being written, or it is no file of ours
        return None


def _began(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0
