"""Runs one request after another: forks a run, watches it until its end, and tells the client."""

import contextlib
import os
import select
import signal
import socket
import struct
import time
from enum import IntEnum

from marl_ray.sandbox.confinement import kernel, run_folder
from marl_ray.sandbox.limits import Level
from marl_ray.sandbox.server import child

REQUEST_BYTES = 256
"""Number of bytes that a server reads at once, more than any request has."""
REPLY = struct.Struct("<BBidd")
"""Format of a reply: reason of the end, whether the run was confined, its wait status, wall and CPU seconds."""
KILL_REQUEST = b"k"
"""Message that ends a run."""
_LOOK_S = 0.05
"""Seconds between looks at a watched folder, and minimum between those at a run's CPU time: few enough to cost it little."""
_CORES = os.cpu_count() or 1
_UNCONFINED_STATUS = 125
"""Exit status of a run that failed before its program began; env(1) and timeout(1) of coreutils end so, too."""
_RUN_OOM_SCORE, JUDGE_OOM_SCORE, _SERVER_OOM_SCORE = b"1000", b"900", b"0"
"""Values by which the kernel ends runs first, then judges, when the host's memory is used up; servers come last."""


class EndReason(IntEnum):
    """The reason why a run is over."""

    ENDED = 0
    """Its process ended, by itself or by a signal."""
    WALL_LIMIT = 1
    """It lasted as long as it may."""
    CPU_LIMIT = 2
    """It used all the CPU time that it may."""
    STOPPED = 3
    """The client asked for it, or is gone."""
    FOLDER_LIMIT = 4
    """Its folder holds more than it may."""


def open_oom_score() -> int | None:
    """Return a descriptor through which this process sets how early it dies when memory is used up.

    Forks inherit the value. Returns None if the host does not allow it, or wants this process to die early anyway.
    """
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        if int(os.pread(fd, 16, 0)) <= int(_SERVER_OOM_SCORE):
            return fd
        os.close(fd)
    except OSError:
        pass
    return None


def open_last_pid() -> int | None:
    """Return a descriptor through which the first process of a namespace sets the next process id to try.

    So every run has the same id, and cannot count the processes or threads of earlier runs. Returns None for any other
    process, and where the kernel lacks the file.
    """
    with contextlib.suppress(OSError):
        if os.getpid() == 1:
            fd = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(fd, b"1", 0)
            return fd
    return None


def run_one(
    control: socket.socket,
    message: bytes,
    fds: list[int],
    confinement: child.Confinement,
    level: Level,
    oom_score_fd: int | None,
) -> bytes:
    """Run one program in a process of its own, confined as `level` says, and return the reply to its request."""
    job = child.prepare(message, fds, confinement)
    ready, confined = os.pipe()
    started = time.monotonic()
    if oom_score_fd is not None:
        os.pwrite(oom_score_fd, _RUN_OOM_SCORE, 0)  # the process that is forked next inherits it
    pid = kernel.fork()
    if not pid:
        try:
            child.become_run(job, confined, confinement)
        finally:
            os._exit(_UNCONFINED_STATUS)
    if oom_score_fd is not None:
        os.pwrite(oom_score_fd, _SERVER_OOM_SCORE, 0)
    os.close(confined)
    pid_fd = os.pidfd_open(pid)
    try:
        max_wall_s = job.limits.max_wall_s
        if job.kind == child.OFFICIAL_REQUEST:
            max_wall_s += 1.0  # the harness's own process waits one second longer than its timeout
        watched_folder = "" if level == Level.NAMESPACES else confinement.folder
        reason = _watch(control, pid, pid_fd, started + max_wall_s, job.cpu_s, watched_folder)
        if reason != EndReason.ENDED:
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        if os.getpid() == 1:
            # the namespace belongs to this server alone, so this ends any process that survived
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        wall_s = time.monotonic() - started
        was_confined = os.read(ready, 1) == b"."
    finally:
        os.close(pid_fd)
        os.close(ready)
    return REPLY.pack(reason, was_confined, status, wall_s, usage.ru_utime + usage.ru_stime)


def _watch(
    control: socket.socket, pid: int, pid_fd: int, deadline: float, cpu_s: float, watched_folder: str
) -> EndReason:
    """Wait until the run is over, and return the reason; `deadline` is a time of `time.monotonic`."""
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    poll.register(control, select.POLLIN)
    used_s = 0.0
    while True:
        wait_s = min(deadline - time.monotonic(), max(_LOOK_S, (cpu_s - used_s) / _CORES))
        wait_s = max(0.0, min(wait_s, _LOOK_S) if watched_folder else wait_s)
        events = {fd for fd, _ in poll.poll(int(wait_s * 1000) + 1)}
        if pid_fd in events:
            return EndReason.ENDED
        if events:
            if control.recv(REQUEST_BYTES, socket.MSG_PEEK):
                control.recv(REQUEST_BYTES)
            return EndReason.STOPPED
        if time.monotonic() >= deadline:
            return EndReason.WALL_LIMIT
        used_s = _read_cpu_clock(pid)
        if used_s >= cpu_s:
            return EndReason.CPU_LIMIT
        if watched_folder and run_folder.is_full(
            watched_folder, run_folder.MAX_FOLDER_BYTES, run_folder.MAX_FOLDER_ENTRIES
        ):
            return EndReason.FOLDER_LIMIT


def _read_cpu_clock(pid: int) -> float:
    """Return the CPU seconds of another process, all threads together, or 0.0 if it has just ended.

    The rlimit counts whole seconds only.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock id that clock_getcpuclockid would return
    except OSError:
        return 0.0
