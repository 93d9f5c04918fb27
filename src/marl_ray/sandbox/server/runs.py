"""Runs one request after another: forks a run, watches it until its end, and tells the client."""

import contextlib
import os
import select
import signal
import socket
import struct
import time

from marl_ray.sandbox.confinement import kernel, run_folder
from marl_ray.sandbox.limits import Level
from marl_ray.sandbox.server import child

REQUEST_BYTES = 256
"""Number of bytes that a server reads at once, more than any request has."""
REPLY = struct.Struct("<BBidd")
"""Format of a reply: reason of the end, whether the run was confined, its wait status, wall and CPU seconds."""
ENDED, WALL_LIMIT, CPU_LIMIT, STOPPED, FOLDER_LIMIT = range(5)
KILL_REQUEST = b"k"
FOLDER_BYTES, FOLDER_ENTRIES = 256 << 20, 4096
"""Maximum size of a run's folder, and maximum number of its files and folders."""
_LOOK_S = 0.05
"""Seconds between looks at a watched folder, and minimum between those at a run's CPU time."""
_CORES = os.cpu_count() or 1
_RUN_OOM_SCORE, JUDGE_OOM_SCORE, _SERVER_OOM_SCORE = b"1000", b"900", b"0"
"""Values by which the kernel ends runs first, then judges, when the host's memory is used up; servers come last."""


def open_oom_score() -> int | None:
    """Return a descriptor through which this process sets how early it dies when memory is used up.

    Returns None where there is none.

    Forks inherit the value. There is none if the host does not allow it, or wants this process to die early anyway.
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
    """Return a descriptor with which the first process of a namespace sets the next process id to try.

    So every run has the same id, and cannot count the processes or threads of earlier runs.
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
    oom_score: int | None,
) -> bytes:
    """Run one program in its own child, confined as `level` says, and return the reply to its request as bytes."""
    job = child.prepare(message, fds, confinement)
    ready, confined = os.pipe()
    started = time.monotonic()
    if oom_score is not None:
        os.pwrite(oom_score, _RUN_OOM_SCORE, 0)  # the process that is forked next inherits it
    pid = kernel.fork()
    if not pid:
        try:
            child.become(job, confined, confinement)
        finally:
            os._exit(125)
    if oom_score is not None:
        os.pwrite(oom_score, _SERVER_OOM_SCORE, 0)
    os.close(confined)
    handle = os.pidfd_open(pid)
    try:
        wall = job.limits.max_wall_s + (
            job.kind == child.OFFICIAL_REQUEST
        )  # the official parent joins one second longer
        watched = "" if level == Level.NAMESPACES else confinement.work
        why = _watch(control, pid, handle, started + wall, job.cpu_s, watched)
        if why != ENDED:
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        if os.getpid() == 1:
            # the namespace belongs to this server alone, so this ends any process that survived
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        wall = time.monotonic() - started
        was_confined = os.read(ready, 1) == b"."
    finally:
        os.close(handle)
        os.close(ready)
    return REPLY.pack(why, was_confined, status, wall, usage.ru_utime + usage.ru_stime)


def _watch(control: socket.socket, pid: int, handle: int, deadline: float, cpu_s: float, watched: str) -> int:
    """Return the reason why the run is over.

    It ended, its time is up, the client killed it or is dead, or its folder is full.
    """
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN)
    used = 0.0
    while True:
        wait_s = min(deadline - time.monotonic(), max(_LOOK_S, (cpu_s - used) / _CORES))
        wait_s = max(0.0, min(wait_s, _LOOK_S) if watched else wait_s)
        events = {fd for fd, _ in poll.poll(int(wait_s * 1000) + 1)}
        if handle in events:
            return ENDED
        if events:
            if control.recv(REQUEST_BYTES, socket.MSG_PEEK):
                control.recv(REQUEST_BYTES)
            return STOPPED
        if time.monotonic() >= deadline:
            return WALL_LIMIT
        used = _cpu_clock(pid)
        if used >= cpu_s:
            return CPU_LIMIT
        if watched and run_folder.is_full(watched, FOLDER_BYTES, FOLDER_ENTRIES):
            return FOLDER_LIMIT


def _cpu_clock(pid: int) -> float:
    """Return the CPU seconds of another process, all threads together; the rlimit counts whole seconds only."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock id that clock_getcpuclockid would return
    except OSError:  # the process has just ended
        return 0.0
