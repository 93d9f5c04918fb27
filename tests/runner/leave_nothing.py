"""Runs a command, says how much CPU time it took, and ends every process that it has left behind.

    python tests/runner/leave_nothing.py [--cpu-budget SECONDS] COMMAND ARGUMENT...

Exits with the command's status, or with 1 where the command succeeds but takes more CPU time than its budget. A busy
machine makes a suite slower, and hardly changes its CPU time. SIGINT and SIGTERM reach the command first, and whatever
it still runs is ended as well.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
"""The option of Linux's prctl by which orphans become children of this process."""
GRACE_S = 1.0
"""Seconds that processes have to exit by themselves, and again after SIGTERM."""
STOP_S = 60.0
"""Seconds that the command has to clean up after a signal."""
LOOK_S = 1.0
"""Seconds between two readings of the CPU time of processes that nobody waits for."""


def main(command: list[str], budget_s: float | None = None) -> int:
    # Orphans become children of this process, however their parents have ended.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        print("leave_nothing: this system has no subreapers; orphans may stay", file=sys.stderr)
    child = subprocess.Popen(command)
    signals: list[int] = []

    def tell(number: int, frame: object) -> None:
        if not signals:
            signal.alarm(int(STOP_S))
        signals.append(number)
        # A terminal sends SIGINT to the child by itself.
        if number != signal.SIGINT or len(signals) > 1:
            child.send_signal(signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        child.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, tell)
    signal.signal(signal.SIGALRM, stop)
    unwaited: dict[int, float] = {}
    threading.Thread(target=_look, args=(unwaited,), daemon=True).start()
    while child.returncode is None:
        pid, status = os.wait()  # orphans too, as the system's first process would
        unwaited.pop(pid, None)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    for process in psutil.Process().children():
        unwaited.pop(process.pid, None)  # its parent has ended, and this process waits for it
    _end_the_rest()
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = waited.ru_utime + waited.ru_stime + sum(list(unwaited.values()))
    print(f"leave_nothing: {used_s:,.0f} s of CPU time", file=sys.stderr)
    if budget_s is not None and used_s > budget_s and child.returncode == 0:
        print(f"leave_nothing: expected at most {budget_s:,.0f} s of CPU time", file=sys.stderr)
        return 1
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _look(unwaited: dict[int, float]) -> None:
    """Keep the CPU seconds of every process whose parent ignores its end, as Ray's raylet does.

    The system adds a process's time to its parent's only where the parent waits for it. What a process takes after the
    last look is missed.
    """
    while True:
        parents, used_s = _processes()
        ignoring = {pid for pid in set(parents.values()) if _descends(pid, parents) and _ignores_ends(pid)}
        unwaited |= {pid: used_s[pid] for pid, parent in parents.items() if parent in ignoring}
        time.sleep(LOOK_S)


def _processes() -> tuple[dict[int, int], dict[int, float]]:
    """Return the parent and the CPU seconds of every process, with those of children it waited for.

    psutil would read far more.
    """
    parents, used_s = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just exited
            # As bytes, because a process may name itself by any.
            words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            parents[int(pid)] = int(words[1])
            used_s[int(pid)] = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return parents, used_s


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _ignores_ends(pid: int) -> bool:
    with contextlib.suppress(OSError):
        match = re.search(rb"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_bytes(), re.MULTILINE)
        return match is not None and bool(int(match[1], 16) >> (signal.SIGCHLD - 1) & 1)
    return False


def _end_the_rest() -> None:
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GRACE_S)
    for process in alive:
        try:
            print(f"leave_nothing: ending {process.pid}, {' '.join(process.cmdline())[:100]}", file=sys.stderr)
        except psutil.Error:
            continue
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            try:
                action(process)
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=GRACE_S)
        alive = psutil.Process().children(recursive=True)  # also those that had other parents before


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--cpu-budget"]:
        sys.exit(main(arguments[2:], float(arguments[1])))
    sys.exit(main(arguments))
