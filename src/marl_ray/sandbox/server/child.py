"""The forked process, which confines itself and then runs the program.

`become_run` never returns to the server.
"""

import atexit
import contextlib
import gc
import io
import os
import random
import resource
import socket
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from marl_ray.sandbox import codec, wire
from marl_ray.sandbox.confinement import kernel, landlock
from marl_ray.sandbox.confinement.seccomp import Filter
from marl_ray.sandbox.limits import Limits
from marl_ray.sandbox.server import candidate, official

RUN_REQUEST = b"R"
"""Request for a script."""
OFFICIAL_REQUEST = b"O"
"""Request for the official harness."""
CALLS_REQUEST = b"C"
"""Request for a candidate that answers a judge's calls."""
IN_PLACE_REQUEST = b"I"
"""Request for a candidate that also reports how it changed the arguments of the calls."""
CHANNEL = 3
"""The one descriptor besides 0, 1 and 2: the official result pipe, or the socket to the judge."""
_FLUSH_FAILED_STATUS = 120
"""Exit status of Python if stdout cannot be flushed at the end, by the documentation of `sys.exit`."""
_REHEARSALS = 50
"""Number of rehearsals of a run; more than the interpreter needs to specialise their code (PEP 659)."""
_SIGKILL = 9
"""The signal's number on Linux, signal(7)."""
MAX_THREADS = 64
"""Maximum number of threads and processes of a run that has a user of its own: enough for the pool of a library, too few
to slow the host down."""


@dataclass(frozen=True)
class Confinement:
    """Confinement of a server's next run."""

    folder: str
    """The run's own folder, its working directory."""
    uid: int | None
    """The user id of another user, who is alone on this host; None to stay the same user."""
    ruleset: int | None
    """Descriptor of the Landlock rule set; None to go without."""
    filter: Filter
    """The filter of system calls that the run adds to its server's."""


def rlimits(limits: Limits, cpu_s: float, bounds_threads: bool) -> list[tuple[int, int]]:
    """Return the rlimits of a run and their values, none above the hard limit of the host.

    With `bounds_threads` the number of threads is limited too, which the kernel counts by user.
    """
    values = [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, int(cpu_s) + 1),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]
    if limits.stack_bytes is not None:
        values.append((resource.RLIMIT_STACK, limits.stack_bytes))
    if bounds_threads:
        values.append((resource.RLIMIT_NPROC, MAX_THREADS))
    hard = [resource.getrlimit(limit)[1] for limit, _ in values]
    return [
        (limit, value if top == resource.RLIM_INFINITY else min(value, top))
        for (limit, value), top in zip(values, hard, strict=True)
    ]


def confine(values: list[tuple[int, int]], confinement: Confinement, orphan_dies: bool = True) -> None:
    """Apply rlimits, user, capabilities, Landlock and seccomp to this process, which can only lose rights afterwards.

    The server has already set no_new_privs and installed its own filter. With `orphan_dies` the kernel kills this
    process once its parent is gone.
    """
    for limit, value in values:
        resource.setrlimit(limit, (value, value))
    if confinement.uid is None:
        kernel.drop_capabilities()
    else:  # changing the user drops the capabilities too
        os.setgroups([])
        os.setresgid(confinement.uid, confinement.uid, confinement.uid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
    if orphan_dies:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if confinement.ruleset is not None:
        landlock.restrict(confinement.ruleset)
    confinement.filter.install()


@dataclass(frozen=True)
class ProgramJob:
    """A request, prepared before the fork, because work in a fork costs it page faults."""

    kind: bytes
    """One of the constants of this module whose names end in REQUEST."""
    limits: Limits
    cpu_s: float
    """The seconds of CPU time after which the server ends the run."""
    rlimits: list[tuple[int, int]]
    """Kernel limits and their values."""
    fds: list[int]
    """Descriptors of the payload, then of a script's stdin, stdout and stderr, or else of the channel."""


def prepare(message: bytes, fds: list[int], confinement: Confinement) -> ProgramJob:
    """Return the job of a request.

    The request's `message` holds kind and limits; the program is behind the descriptors `fds`.
    """
    return ProgramJob(*_parse_request(message, confinement.uid is not None), fds)


@lru_cache(maxsize=64)
def _parse_request(message: bytes, bounds_threads: bool) -> tuple[bytes, Limits, float, list[tuple[int, int]]]:
    kind, limits = message[:1], Limits.unpack(message[1:])
    cpu_s = limits.cpu_s
    if kind == OFFICIAL_REQUEST:
        cpu_s += 1.0  # the harness's alarm comes first, and the program may handle it
    return kind, limits, cpu_s, rlimits(limits, cpu_s, bounds_threads)


def warm_up() -> None:
    """Run in the server what every run begins with, so that no fork has to copy the memory pages that this changes."""
    source = b"from typing import List\ndef f(a: List[int]) -> int:\n    'text'\n    return [b for b in a if b]\nf([1])"
    local, remote = socket.socketpair()
    for _ in range(_REHEARSALS):
        wire.send_frame(local.fileno(), codec.dumps({"value": codec.pack([1])}, 99))
        codec.loads(wire.receive_frame(remote.fileno(), 99))
        fd = wire.create_payload(source, b"f")
        program, _ = wire.read_payload(fd)
        os.close(fd)
        exec(compile(wire.decode_text(program), "<rehearsal>", "exec", dont_inherit=True), {})
        codec.unpack(codec.loads(codec.dumps(codec.pack([1, (2, "3"), {4: 5.0}]), 99)), 99)
    local.close()
    remote.close()


def become_run(job: ProgramJob, ready: int, confinement: Confinement) -> None:
    """Turn this forked process into the run, and end with it.

    A byte is written to the descriptor `ready` once the process is confined, before the program starts.
    """
    program, *blobs = wire.read_payload(job.fds[0])
    os.setsid()
    descriptors = job.fds[1:]
    if job.kind != RUN_REQUEST:
        # The server does not open it: flags that a program sets on a descriptor of the server would outlive the run.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        descriptors = [null, null, null, *descriptors]
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number, inheritable=False)
    first_free = CHANNEL if job.kind == RUN_REQUEST else CHANNEL + 1
    statistics = _open_file("/proc/self/schedstat") if job.kind == OFFICIAL_REQUEST else None
    os.chdir(confinement.folder)
    confine(job.rlimits, confinement)
    os.write(ready, b".")
    if statistics is not None:  # only now, because confining needs descriptors that may have this number
        os.dup2(statistics, official.STATISTICS_FD, inheritable=False)
        first_free = official.STATISTICS_FD + 1
    kernel.close_from(first_free)
    random.seed()
    gc.enable()
    sys.path.insert(0, "")
    source = wire.decode_text(program)
    if job.kind == RUN_REQUEST:
        for name, content in zip(blobs[::2], blobs[1::2], strict=True):
            _write_file(wire.decode_text(name), content)
        run_script(source)
    elif job.kind == OFFICIAL_REQUEST:
        unbuffered = os.fdopen(CHANNEL, "wb", 0)
        official.unsafe_execute(
            source, job.limits.cpu_s, job.limits.max_wall_s, official.OfficialResult(unbuffered.write)
        )
    else:
        entry_point = wire.decode_text(blobs[0])
        in_place = job.kind == IN_PLACE_REQUEST
        candidate.answer_calls(CHANNEL, source, entry_point, job.limits.frame_bytes, in_place)
    os._exit(0)


def _open_file(path: str) -> int | None:
    """Return a descriptor of a file to read; None if the host has no such file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _write_file(name: str, content: bytes) -> None:
    folder = os.path.dirname(name)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(name, "wb") as file:
        file.write(content)


def run_script(program: str) -> None:
    """Run a program as `python -c` does, and end this process with its exit status.

    `__main__`, argv, buffering, tracebacks and exit status are those of `python -c`; threads are joined, and what
    `atexit` registers is run.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        errors = "backslashreplace" if number == 2 else "surrogateescape"
        file = io.FileIO(number, "wb" if number else "rb", closefd=False)
        raw = io.BufferedWriter(file) if number else io.BufferedReader(file)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["-c"]
    atexit._clear()
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    status = _exit_status_of(lambda: exec(compile(program, "<string>", "exec", dont_inherit=True), main.__dict__), 2)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main.__dict__.clear()
    flush_status = _exit_status_of(lambda: sys.stdout.flush() if sys.stdout and not sys.stdout.closed else None, 1)
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(status or (_FLUSH_FAILED_STATUS if flush_status else 0))


def _exit_status_of(body: Callable[[], object], hidden_frames: int) -> int:
    """Call `body`, and return the exit status that the interpreter would give, after printing its traceback.

    The traceback lacks its first `hidden_frames` frames, which are the sandbox's own.
    """
    try:
        body()
    except SystemExit as stop:
        code = stop.code
        if code is None or isinstance(code, int):
            return (code or 0) & 0xFF
        print(code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(hidden_frames):
            trace = trace.tb_next if trace else None
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0
