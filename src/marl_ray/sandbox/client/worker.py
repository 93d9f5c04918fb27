"""The client's side of one worker: a fork server and, from the first judgement on, a judge."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence

from marl_ray.errors import MarlRayError
from marl_ray.sandbox import wire
from marl_ray.sandbox.client.locked_folders import create_locked_folder
from marl_ray.sandbox.client.process import CLOSE_S, Greeting, ProcessDiedError, SandboxProcess, wait_readable
from marl_ray.sandbox.client.run_end import RunEnd
from marl_ray.sandbox.confinement import run_folder
from marl_ray.sandbox.limits import Level, Limits
from marl_ray.sandbox.server import child, judge, runs

ANSWER_S = 10.0
"""Seconds beyond a run's own limits in which a server must report its end."""
_JUDGE_GRACE_S = 5.0
"""Seconds in which a judge says its verdict once its candidate has ended: a judge that gets no core is not late."""
_READ_BYTES = 1 << 16
"""Number of bytes that are read of a pipe at once: what a pipe holds on Linux, pipe(7)."""


class Worker:
    """One fork server and its judge; replaced when either fails."""

    def __init__(self, max_level: Level, warm: Sequence[str]):
        self._max_level, self._warm = max_level, warm
        self._judge: SandboxProcess | None = None
        self._lock: int | None = None
        self.start()

    def start(self) -> None:
        """Make the folder of the runs, and begin a fork server in it. `hello` waits until it is ready."""
        with contextlib.ExitStack() as unfinished:  # removes the folder where the server cannot begin
            self.folder, lock = create_locked_folder()
            unfinished.callback(os.close, lock)
            unfinished.callback(run_folder.remove, self.folder)
            self._server = SandboxProcess("server", self.folder, self._max_level, self._warm)
            unfinished.pop_all()
        self._lock = lock

    def hello(self) -> Greeting:
        """Wait until the fork server is ready, and return its first message. Raises MarlRayError if it cannot start."""
        return self._server.hello()

    @property
    def pids(self) -> list[int]:
        """The process ids of the fork server and, once one has started, of the judge."""
        return [each.process.pid for each in (self._server, self._judge) if each]

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End the fork server and the judge, and remove the folder with all that is in it.

        The server has `wait_s` seconds to end by itself before it is killed. Raises subprocess.TimeoutExpired, after the
        rest, if one of the two is still there CLOSE_S seconds later.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self.drop_judge)
            if self._lock is not None:
                closing.callback(os.close, self._lock)
                self._lock = None
            closing.callback(run_folder.remove, self.folder)
            closing.callback(self._server.close, wait_s)

    def drop_judge(self) -> None:
        """Kill the judge, if there is one; the next judgement starts a new one."""
        if self._judge:
            self._judge.process.kill()
            self._judge.close(CLOSE_S)
            self._judge = None

    def disconnect(self) -> None:
        """Let the processes end, from any thread: the one that waits for an answer gets ProcessDiedError."""
        for process in (self._server, self._judge):
            if process:
                process.disconnect()

    def abandon(self) -> None:
        """Kill the processes, because their next answers belong to a run that was given up.

        The next use replaces them.
        """
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
        """Ask the fork server to kill the run; it reports this end as any other.

        Raises ProcessDiedError if the server has ended.
        """
        self._server.send(runs.KILL_REQUEST)

    def _receive_end(self, deadline: float) -> RunEnd:
        """Return the end of the run. Raises MarlRayError if the run could not be confined, and so was not started."""
        data = self._server.receive(deadline)
        if len(data) != runs.REPLY.size:
            raise ProcessDiedError
        reason, was_confined, status, wall_s, cpu_s = runs.REPLY.unpack(data)
        if not was_confined and reason == runs.EndReason.ENDED:
            raise MarlRayError("the sandbox could not confine a run on this host, and did not start it")
        return RunEnd(runs.EndReason(reason), status, wall_s, cpu_s)

    def drain(self, pipes: dict[int, int], limits: Limits) -> tuple[RunEnd, dict[int, bytearray], bool]:
        """Read pipes until the run ends, and return its end, the bytes of each pipe, and whether it wrote too much.

        `pipes` maps each descriptor to the most bytes that the run may write there; a run that writes more is killed.
        Raises ProcessDiedError if the server does not report the end in time.
        """
        received: dict[int, bytearray] = {fd: bytearray() for fd in pipes}
        deadline = time.monotonic() + limits.max_wall_s + ANSWER_S
        open_fds, flooded = set(pipes), False
        while True:
            ready = wait_readable([*open_fds, self._server.socket], deadline)
            if not ready:
                raise ProcessDiedError
            for fd in open_fds.intersection(item for item in ready if isinstance(item, int)):
                flooded |= not self._read(fd, received[fd], pipes[fd], open_fds)
            if flooded and open_fds:
                open_fds.clear()
                self.kill_run()
            if self._server.socket in ready:
                end = self._receive_end(deadline)
                for fd in list(open_fds):  # read what the run wrote before its end
                    while fd in open_fds and wait_readable([fd], 0):
                        flooded |= not self._read(fd, received[fd], pipes[fd], open_fds)
                return end, received, flooded

    @staticmethod
    def _read(fd: int, buffer: bytearray, max_bytes: int, open_fds: set[int]) -> bool:
        """Read once from a pipe into its buffer; return False if that then held more than `max_bytes`.

        A pipe that is at its end, or held too much, is taken from `open_fds`.
        """
        chunk = os.read(fd, _READ_BYTES)
        if not chunk:
            open_fds.discard(fd)
        buffer += chunk
        if len(buffer) > max_bytes:
            del buffer[max_bytes:]
            open_fds.discard(fd)
            return False
        return True

    def is_healthy(self) -> bool:
        """Return True if a program that does nothing runs to its end in this worker."""
        limits = Limits()
        with contextlib.ExitStack() as stack:
            fds = [wire.create_payload(b""), *(os.open(os.devnull, os.O_RDWR) for _ in range(3))]
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

        `program` and `tests` are descriptors of payloads. `kind` is one of the judge's kinds of requests: `PLAIN_KIND`,
        `IN_PLACE_KIND` or `ALONE_KIND`. Raises ProcessDiedError if the server or the judge does not answer in time.
        """
        local, remote = socket.socketpair()
        with local:
            with remote:
                if self._judge is None:
                    self._judge = SandboxProcess("judge", self.folder, self._max_level, self._warm)
                    self._judge.hello()
                self._judge.send(kind + limits.pack(), [tests, local.fileno()])
                self.request(
                    child.CALLS_REQUEST if kind == judge.PLAIN_KIND else child.IN_PLACE_REQUEST,
                    limits,
                    [program, remote.fileno()],
                )
            deadline = time.monotonic() + limits.max_wall_s + ANSWER_S
            ready = wait_readable([self._judge.socket, self._server.socket], deadline)
            if not ready:
                raise ProcessDiedError
            if self._judge.socket in ready:
                verdict, message = self._receive_verdict(self._judge, deadline)
                self.kill_run()
                return self._receive_end(deadline), verdict, message
            end = self._receive_end(deadline)
            # The judge sees the end, even if another process holds the candidate's side.
            local.shutdown(socket.SHUT_RDWR)
            return end, *self._receive_verdict(self._judge, time.monotonic() + _JUDGE_GRACE_S)

    def _receive_verdict(self, process: SandboxProcess, deadline: float) -> tuple[str, str]:
        """Return the judge's verdict and message.

        Raises ProcessDiedError if it ended for another reason than its limits, or gave no verdict.
        """
        late = not wait_readable([process.socket], deadline)
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
            return wire.decode_verdict(data[1:])
        except wire.MalformedMessageError:
            raise ProcessDiedError from None
