"""Runs a command and then ends every process that it has left behind: python tests/leave_nothing.py COMMAND ARGUMENT...

Exits with the command's status. SIGINT and SIGTERM reach the command first, and whatever it still runs is ended as well.
"""

import ctypes
import os
import signal
import subprocess
import sys

import psutil

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0
"""How long processes have to exit by themselves, and again after SIGTERM."""
STOP_S = 60.0
"""How long the command may clean up after a signal."""


def main(command: list[str]) -> int:
    # Orphans become children of this process, however their parents have ended.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        print("leave_nothing: this system has no subreapers; orphans may stay", file=sys.stderr)
    child = subprocess.Popen(command)
    told: list[int] = []

    def tell(number: int, frame: object) -> None:
        if not told:
            signal.alarm(int(STOP_S))
        told.append(number)
        # A terminal sends SIGINT to the child by itself.
        if number != signal.SIGINT or len(told) > 1:
            child.send_signal(signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        child.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, tell)
    signal.signal(signal.SIGALRM, stop)
    while child.returncode is None:
        pid, status = os.wait()  # orphans too, as the system's first process would
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    _end_the_rest()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_the_rest() -> None:
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GRACE_S)
    for process in left:
        try:
            print(f"leave_nothing: ending {process.pid}, {' '.join(process.cmdline())[:100]}", file=sys.stderr)
        except psutil.Error:
            continue
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            try:
                action(process)
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=GRACE_S)
        left = psutil.Process().children(recursive=True)  # also those that had other parents before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
