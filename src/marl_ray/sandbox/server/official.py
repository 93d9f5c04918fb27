"""The semantics of openai/human-eval's `execution.py`, inside a run of the sandbox.

Its quirks are kept on purpose, so that a reported score is the official one: functions set to None, stdin that cannot be
read, SIGALRM that a program may swallow, a `result` that a program may reach by walking frames. Only the clock differs: it
stands while the program waits for a core, so that a busy machine changes no score; a program that sleeps is late, as it
is in the harness. Nothing here may use `from __future__ import`: `exec` would inherit it.
"""

import builtins
import contextlib
import faulthandler
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

_REMOVED_OS_FUNCTIONS = """kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames
truncate replace unlink fchmod fchown chmod chown chroot fchdir lchflags lchmod lchown getcwd chdir"""
"""Functions of `os` that the harness sets to None, in its order, `fchdir` twice as there."""
STATISTICS_FD = 4
"""Descriptor of the process' `/proc/self/schedstat`, if there is one."""


class TimeoutException(Exception):  # noqa: N818
    """The program took longer than its limit; the harness of HumanEval has this name."""


class WriteOnlyStringIO(io.StringIO):
    """A stream that takes text and raises OSError when it is read, as in the harness of HumanEval."""

    def read(self, *args: object, **kwargs: object) -> str:
        """Raise OSError, as `readline` and `readlines` do."""
        raise OSError

    readline = readlines = read  # type: ignore[assignment]

    def readable(self) -> bool:
        """Return False."""
        return False


class _RedirectStdin(contextlib._RedirectStream[WriteOnlyStringIO]):  # noqa: SLF001  as the official harness does
    _stream = "stdin"


@contextlib.contextmanager
def swallow_io() -> Iterator[None]:
    """Send stdout and stderr nowhere within the block, and let reading stdin raise OSError."""
    stream = WriteOnlyStringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), _RedirectStdin(stream):
        yield


@contextlib.contextmanager
def time_limit(seconds: float, max_wall_s: float) -> Iterator[None]:
    """Set the official alarm, on a clock that stops while this thread waits for a core.

    The alarm fires after `max_wall_s` seconds in any case.
    """
    started, waited = time.monotonic(), waiting_s()

    def signal_handler(signum: int, frame: object) -> None:
        passed = time.monotonic() - started
        remaining = min(seconds - passed + waiting_s() - waited, max_wall_s - passed)
        if remaining <= 0:
            raise TimeoutException("Timed out!")
        signal.setitimer(signal.ITIMER_REAL, max(remaining, 0.001))

    signal.setitimer(signal.ITIMER_REAL, min(seconds, max_wall_s))
    signal.signal(signal.SIGALRM, signal_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def waiting_s() -> float:
    """Return the seconds for which the main thread was ready to run but had no core.

    Returns 0 if the kernel does not report them.
    """
    try:
        return int(os.pread(STATISTICS_FD, 100, 0).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def reliability_guard() -> None:
    """Set to None what the official guard sets to None, no more and no less."""
    faulthandler.disable()
    builtins.exit = None  # type: ignore[assignment]
    builtins.quit = None  # type: ignore[assignment]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _REMOVED_OS_FUNCTIONS.split():
        setattr(os, name, None)
    for name in ("rmtree", "move", "chown"):
        setattr(shutil, name, None)
    subprocess.Popen = None  # type: ignore[assignment,misc]
    builtins.help = None  # type: ignore[assignment]
    for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
        sys.modules[name] = None  # type: ignore[assignment]


class OfficialResult:
    """Replaces the official list of results.

    The first text that is appended counts, even if the program dies afterwards.
    """

    def __init__(self, write: Callable[[bytes], object]):
        self._write = write

    def append(self, text: str) -> None:
        """Write a text, after the number of its bytes: eight bytes, little-endian."""
        data = text.encode("utf-8", "backslashreplace")
        self._write(len(data).to_bytes(8, "little") + data)


def unsafe_execute(check_program: str, timeout: float, max_wall_s: float, result: OfficialResult) -> None:
    """Run a program with its tests in this interpreter, `timeout` seconds at most.

    Appends passed, timed out or failed to `result`.
    """
    reliability_guard()
    try:
        exec_globals: dict[str, object] = {}
        with swallow_io(), time_limit(timeout, max_wall_s):
            exec(check_program, exec_globals)
        result.append("passed")
    except TimeoutException:
        result.append("timed out")
    except BaseException as e:
        result.append(f"failed: {e}")


def first_result(data: bytes) -> str:
    """Return the text that the program appended first; without one the harness assumes a timeout.

    Bytes that are not text are escaped.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8:
        return "timed out"
    return data[8 : 8 + size].decode("utf-8", "backslashreplace")
