"""The client's side of one worker: a fork server and, from the first judgement on, a judge."""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from marl_ray.errors import MarlRayError
from marl_ray.sandbox import wire
from marl_ray.sandbox.confinement import run_folder
from marl_ray.sandbox.limits import Level, Limits
from marl_ray.sandbox.server import child, judge, runs

START_S, ANSWER_S, CLOSE_S = 60.0, 10.0, 5.0
"""Deadlines in seconds: a server's start, its answer beyond a run's own limits, and its end."""
_JUDGE_GRACE_S = 5.0
"""Seconds in which a judge says its verdict once its candidate has ended: a judge that gets no core is not late."""
_FOLDERS = "marl-ray-sandbox."
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
from marl_ray.sandbox.server.fork_server import main
main()
"""


class Greeting(TypedDict):
    """The first message of a sandbox's process."""

    level: int
    """The `Level` of its confinement."""
    why: str
    """The reason that it is no higher."""


class ProcessDiedError(Exception):
    """A server or a judge ended or did not answer in time."""


class Process:
    """A server or a judge: a process with a socket to it."""

    def __init__(self, role: str, folder: str, max_level: Level, warm: Sequence[str]):
        self.socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"fd": remote.fileno(), "folder": folder, "max_level": max_level, "warm": list(warm), "role": role}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        with remote:
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

    def hello(self) -> Greeting:
        """Return the process's first message. Raises MarlRayError if it cannot start."""
        try:
            return cast(Greeting, dict(json.loads(self.receive(time.monotonic() + START_S))))
        except ProcessDiedError:
            text = os.pread(self._errors.fileno(), 1 << 16, 0).decode("utf-8", "replace").strip()
            last = text.splitlines()[-1] if text else f"no answer in {START_S:.0f} s"
            raise MarlRayError(f"the sandbox cannot start: {last}") from None

    def receive(self, deadline: float) -> bytes:
        """Return the process's next message, 4,096 bytes of it at most.

        Raises ProcessDiedError if the process has ended, or says nothing until `deadline`, a time of
        `time.monotonic`.
        """
        if not readable([self.socket], deadline):
            raise ProcessDiedError
        try:
            data = self.socket.recv(4096)
        except OSError:
            raise ProcessDiedError from None
        if not data:
            raise ProcessDiedError
        return data

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message, and descriptors with it, which stay open here. Raises ProcessDiedError if nobody receives."""
        try:
            if fds:
                socket.send_fds(self.socket, [data], list(fds))
            else:
                self.socket.send(data)
        except OSError:
            raise ProcessDiedError from None

    def close(self, wait_s: float) -> None:
        """Close the socket, by which the process ends, and kill it if it has not ended after `wait_s` seconds.

        The process is gone afterwards. Raises subprocess.TimeoutExpired if it is still there CLOSE_S seconds after it was
        killed.
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a fork of our process may hold a copy
        self.socket.close()
        self._errors.close()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(CLOSE_S)


def readable(items: Sequence[Any], deadline: float) -> list[object]:
    """Return the sockets and descriptors that can be read, as soon as one can; empty at the deadline."""
    poll = select.poll()
    numbers = {item if isinstance(item, int) else item.fileno(): item for item in items}
    for number in numbers:
        poll.register(number, select.POLLIN)
    remaining = deadline - time.monotonic()
    return [numbers[number] for number, _ in poll.poll(max(0, int(remaining * 1000) + 1))]


def _own_folder() -> tuple[str, int]:
    """Create a folder and a descriptor that locks it.

    While the descriptor is open, no process removes the folder as forgotten.
    """
    while True:
        path = tempfile.mkdtemp(prefix=_FOLDERS)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # without locks in this file system no other process gets one either
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # another process removed the folder before this one locked it
            os.chmod(path, 0o711)  # runs execute as another user, who must pass through
            return path, lock
        os.close(lock)


def remove_forgotten_folders() -> None:
    """Remove folders of this user whose owner was killed, and so could not remove them."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(_FOLDERS):
            continue
        with contextlib.suppress(OSError):  # another user's folder, one in use, or one just removed
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    run_folder.remove(entry.path)
            finally:
                os.close(lock)


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as the server saw it."""

    why: int
    status: int
    wall_s: float
    cpu_s: float

    @property
    def signal(self) -> int:
        """The number of the signal that killed the run; 0 if it ended by itself."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0

    def timed_out(self, limits: Limits) -> bool:
        """Return True if the run used up its wall time or CPU time, whether the server or the kernel killed it for that."""
        killed = self.signal in (signal.SIGXCPU, signal.SIGKILL) and self.why == runs.ENDED
        by_rlimit = killed and self.cpu_s >= limits.cpu_s - 0.1
        return self.why in (runs.WALL_LIMIT, runs.CPU_LIMIT) or self.cpu_s > limits.cpu_s or by_rlimit


class Worker:
    """One fork server and its judge; replaced when either fails."""

    def __init__(self, max_level: Level, warm: Sequence[str]):
        self._max_level, self._warm = max_level, warm
        self._judge: Process | None = None
        self._lock: int | None = None
        self.start()

    def start(self) -> None:
        """Make the folder of the runs, and begin a fork server in it, without waiting until it is ready: `hello` does."""
        self.folder, self._lock = _own_folder()
        self._server = Process("server", self.folder, self._max_level, self._warm)

    def hello(self) -> Greeting:
        """Wait until the fork server is ready, and return its first message. Raises MarlRayError if it cannot start."""
        return self._server.hello()

    @property
    def pids(self) -> list[int]:
        """The process ids of the fork server and, once one has started, of the judge."""
        return [each.process.pid for each in (self._server, self._judge) if each]

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End the fork server, after `wait_s` seconds by force, and the judge; remove the folder with all that is in it."""
        self._server.close(wait_s)
        run_folder.remove(self.folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self.drop_judge()

    def drop_judge(self) -> None:
        """Kill the judge, if there is one; the next judgement starts a new one."""
        if self._judge:
            self._judge.process.kill()
            self._judge.close(CLOSE_S)
            self._judge = None

    def abandon(self) -> None:
        """End the processes, because their next answers belong to a run that was given up; the next use replaces them."""
        for process in (self._server, self._judge):
            if process:
                process.process.kill()
                process.socket.close()

    def restart(self) -> None:
        """Replace the fork server, the judge and the folder, so that nothing of earlier runs is left.

        Kills what is running. Raises MarlRayError if a new fork server cannot start.
        """
        self.close(0)
        self.start()
        self.hello()

    def request(self, kind: bytes, limits: Limits, fds: Sequence[int]) -> None:
        """Ask the fork server to start a run of the `kind`, within the limits, with copies of these descriptors.

        Returns at once: `drain` waits for the end. Raises ProcessDiedError if the server has ended.
        """
        self._server.send(kind + limits.pack(), fds)

    def kill_run(self) -> None:
        """Ask the fork server to kill the run; it reports this end as any other. Raises ProcessDiedError if it has ended."""
        self._server.send(runs.KILL_REQUEST)

    def _end(self, deadline: float) -> RunEnd:
        data = self._server.receive(deadline)
        if len(data) != runs.REPLY.size:
            raise ProcessDiedError
        why, confined, status, wall, cpu = runs.REPLY.unpack(data)
        if not confined and why == runs.ENDED:
            raise MarlRayError("the sandbox could not confine a run on this host, and did not start it")
        return RunEnd(why, status, wall, cpu)

    def drain(self, pipes: dict[int, int], limits: Limits) -> tuple[RunEnd, dict[int, bytearray], bool]:
        """Read pipes (descriptor: most bytes) until the run ends.

        A run that writes more is killed, which the third result says.
        """
        received: dict[int, bytearray] = {fd: bytearray() for fd in pipes}
        deadline = time.monotonic() + limits.max_wall_s + ANSWER_S
        todo, flooded = set(pipes), False
        while True:
            ready = readable([*todo, self._server.socket], deadline)
            if not ready:
                raise ProcessDiedError
            for fd in todo.intersection(item for item in ready if isinstance(item, int)):
                flooded |= not self._read(fd, received[fd], pipes[fd], todo)
            if flooded and todo:
                todo.clear()
                self.kill_run()
            if self._server.socket in ready:
                end = self._end(deadline)
                for fd in list(todo):  # read what the run wrote before its end
                    while fd in todo and readable([fd], 0):
                        flooded |= not self._read(fd, received[fd], pipes[fd], todo)
                return end, received, flooded

    @staticmethod
    def _read(fd: int, buffer: bytearray, max_bytes: int, todo: set[int]) -> bool:
        """Read once and return True; return False, and read no more from this pipe, if it holds more than it may."""
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            todo.discard(fd)
        buffer += chunk
        if len(buffer) > max_bytes:
            del buffer[max_bytes:]
            todo.discard(fd)
            return False
        return True

    def is_healthy(self) -> bool:
        """Return True if a program that does nothing runs to its end in this worker."""
        limits = Limits()
        with contextlib.ExitStack() as stack:
            fds = [wire.payload(b""), *(os.open(os.devnull, os.O_RDWR) for _ in range(3))]
            for fd in fds:
                stack.callback(os.close, fd)
            try:
                self.request(child.RUN_REQUEST, limits, fds)
                end, _, _ = self.drain({}, limits)
            except ProcessDiedError:
                return False
            return end.status == 0

    def judge(self, program: int, tests: int, limits: Limits, kind: bytes) -> tuple[RunEnd, str, str]:
        """Judge a candidate, and return its end with the judge's verdict and message.

        `kind` is the request to the judge.
        """
        local, remote = socket.socketpair()
        with local:
            with remote:
                if self._judge is None:
                    self._judge = Process("judge", self.folder, self._max_level, self._warm)
                    self._judge.hello()
                self._judge.send(kind + limits.pack(), [tests, local.fileno()])
                self.request(
                    child.CALLS_REQUEST if kind == judge.PLAIN_KIND else child.IN_PLACE_REQUEST,
                    limits,
                    [program, remote.fileno()],
                )
            deadline = time.monotonic() + limits.max_wall_s + ANSWER_S
            ready = readable([self._judge.socket, self._server.socket], deadline)
            if not ready:
                raise ProcessDiedError
            if self._judge.socket in ready:
                verdict, message = self._verdict(self._judge, deadline)
                self.kill_run()
                return self._end(deadline), verdict, message
            end = self._end(deadline)
            # the judge sees the end, even if another process holds the candidate's side
            local.shutdown(socket.SHUT_RDWR)
            return end, *self._verdict(self._judge, time.monotonic() + _JUDGE_GRACE_S)

    def _verdict(self, process: Process, deadline: float) -> tuple[str, str]:
        """Return the judge's verdict and message.

        Raises ProcessDiedError if it ended for another reason than its limits, or gave no verdict.
        """
        late = not readable([process.socket], deadline)
        try:
            data = b"" if late else process.receive(deadline)
        except ProcessDiedError:
            data = b""
        if data[:1] != b"+":  # no verdict, or the last one
            self.drop_judge()
        if late:
            return "timeout", "the tests did not end"
        if not data and process.process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
            return "timeout", "the tests took too long"
        try:
            return wire.read_verdict(data[1:])
        except wire.MalformedMessageError:
            raise ProcessDiedError from None
