"""The end of a run, and the result that it means."""

import os
import signal
from dataclasses import dataclass

from marl_ray.sandbox.limits import Execution, Level, Limits, Status
from marl_ray.sandbox.server.runs import EndReason

_CPU_TOLERANCE_S = 0.1
"""Seconds by which the CPU time that the kernel reports may stay below the limit at which it killed."""


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as the server saw it."""

    reason: EndReason
    status: int
    """The wait status of its process, as `os.wait4` returns it."""
    wall_s: float
    """Its duration in seconds."""
    cpu_s: float
    """The CPU seconds of all its threads."""

    @property
    def signal(self) -> int:
        """The number of the signal that killed the run; 0 if it ended by itself."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0

    def timed_out(self, limits: Limits) -> bool:
        """Return True if the run used up its wall time or CPU time, whether the server or the kernel killed it for that."""
        killed = self.signal in (signal.SIGXCPU, signal.SIGKILL) and self.reason == EndReason.ENDED
        by_rlimit = killed and self.cpu_s >= limits.cpu_s - _CPU_TOLERANCE_S
        by_server = self.reason in (EndReason.WALL_LIMIT, EndReason.CPU_LIMIT)
        return by_server or self.cpu_s > limits.cpu_s or by_rlimit


def execution_of(end: RunEnd, out: bytes, err: bytes, flooded: bool, limits: Limits, level: Level) -> Execution:
    """Return the result of a run that has ended and wrote `out` and `err`.

    `flooded` is True if it wrote more than it may.
    """
    returncode = None if end.signal else os.WEXITSTATUS(end.status)
    if end.timed_out(limits):
        status = Status.TIMEOUT
    elif flooded or end.reason == EndReason.FOLDER_LIMIT:
        status = Status.OUTPUT_LIMIT
    elif err.rpartition(b"\n")[0].rpartition(b"\n")[2].startswith(b"MemoryError") and returncode != 0:
        status = Status.OOM
    elif end.signal:
        status = Status.CRASH
    else:
        status = Status.EXIT if returncode else Status.OK
    return Execution(status, returncode, out, err, end.wall_s, end.cpu_s, level)
