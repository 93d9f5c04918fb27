"""A process of the sandbox, a fork server or a judge, as its client sees it."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from marl_ray.errors import MarlRayError
from marl_ray.sandbox.limits import Level

START_S = 60.0
"""Seconds in which a process must say its first message; a machine under load imports slowly."""
CLOSE_S = 5.0
"""Seconds in which a process must end after its socket is closed, and once more after it is killed."""
_MESSAGE_BYTES = 4096
"""Number of bytes that are read of a message: more than a verdict has, the longest one."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same order of sets in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # arenas of threads would use up the address space
    "TZ": "UTC",
}
_SOURCE = str(Path(__file__).resolve().parents[3])
_BOOT = """
import sys
sys.path.insert(0, sys.argv.pop())  # this very package, whatever else is installed under its name
import marl_ray
del sys.path[0]
from marl_ray.sandbox.server.forker import main
main()
"""


class Greeting(TypedDict):
    """The first message of a sandbox's process."""

    level: int
    """The `Level` of its confinement."""
    reason: str
    """The reason why it is no higher."""


class ProcessDiedError(Exception):
    """A server or a judge ended or did not answer in time."""


class SandboxProcess:
    """A process and the socket to it."""

    def __init__(self, role: str, folder: str, max_level: Level, warm: Sequence[str]):
        """Start the process as a `role` of "server" or "judge", without waiting for it.

        `folder` is that of the worker, `warm` the modules to import before the first request.
        """
        self.socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"fd": remote.fileno(), "folder": folder, "max_level": max_level, "warm": list(warm), "role": role}
        with contextlib.ExitStack() as unfinished, remote:  # closes our files where the process cannot begin
            unfinished.callback(self.socket.close)
            self._errors = unfinished.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", "-c", _BOOT, json.dumps(options), _SOURCE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[remote.fileno()],
                start_new_session=True,
            )
            unfinished.pop_all()

    def hello(self) -> Greeting:
        """Return the process's first message. Raises MarlRayError if it cannot start."""
        deadline = time.monotonic() + START_S
        try:
            return cast(Greeting, dict(json.loads(self.receive(deadline))))
        except ProcessDiedError:
            text = os.pread(self._errors.fileno(), 1 << 16, 0).decode("utf-8", "replace").strip()
            silence = "its process ended" if time.monotonic() < deadline else f"no answer in {START_S:.0f} s"
            raise MarlRayError(f"the sandbox cannot start: {text.splitlines()[-1] if text else silence}") from None

    def receive(self, deadline: float) -> bytes:
        """Return the process's next message, _MESSAGE_BYTES of it at most.

        Raises ProcessDiedError if the process has ended, or says nothing until `deadline`, a time of
        `time.monotonic`.
        """
        if not wait_readable([self.socket], deadline):
            raise ProcessDiedError
        try:
            data = self.socket.recv(_MESSAGE_BYTES)
        except OSError:
            raise ProcessDiedError from None
        if not data:
            raise ProcessDiedError
        return data

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message, with copies of descriptors. Raises ProcessDiedError if nobody receives."""
        try:
            if fds:
                socket.send_fds(self.socket, [data], list(fds))
            else:
                self.socket.send(data)
        except OSError:
            raise ProcessDiedError from None

    def disconnect(self) -> None:
        """Shut the socket down, so that the process ends, and a thread that waits for its answer gets ProcessDiedError."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a fork of our process may hold a copy

    def close(self, wait_s: float) -> None:
        """Close the socket, by which the process ends, and kill it if it has not ended after `wait_s` seconds.

        Raises subprocess.TimeoutExpired if it is still there CLOSE_S seconds after it was killed.
        """
        self.disconnect()
        self.socket.close()
        self._errors.close()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(CLOSE_S)


def wait_readable(items: Sequence[Any], deadline: float) -> list[object]:
    """Wait until a socket or a descriptor can be read, and return those that can.

    Returns none at the deadline, which is a time of `time.monotonic`.
    """
    poll = select.poll()
    numbers = {item if isinstance(item, int) else item.fileno(): item for item in items}
    for number in numbers:
        poll.register(number, select.POLLIN)
    remaining = deadline - time.monotonic()
    return [numbers[number] for number, _ in poll.poll(max(0, int(remaining * 1000) + 1))]
