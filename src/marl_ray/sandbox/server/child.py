"""The forked process: it confines itself, then runs the program. No function here returns to the server."""

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
from typing import Any

from marl_ray.sandbox import codec, wire
from marl_ray.sandbox.confinement import kernel, landlock
from marl_ray.sandbox.confinement.seccomp import Filter
from marl_ray.sandbox.limits import Limits
from marl_ray.sandbox.server import official

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
_SIGKILL = 9
"""The signal's number on Linux, signal(7)."""
MAX_THREADS = 64
"""Maximum number of threads and processes of a run that has a user of its own."""
_ANY_SIZE = 1 << 62
"""Size that no message reaches: what the judge sends has no limit."""
_MAX_ARGS_LENGTH = 10_000
"""Maximum number of items, and of bytes of their message, of an exception's arguments."""


@dataclass(frozen=True)
class Confinement:
    """Confinement of a server's runs. uid: another user, alone on this host, or None to stay the same user."""

    work: str
    uid: int | None
    paths: int | None
    filter: Filter


def rlimits(limits: Limits, cpu_s: float, threads: bool) -> list[tuple[int, int]]:
    """Return the limits and their values, none above the hard limit of the host.

    With `threads` the number of threads is bounded too; it is counted per user.
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
    if threads:
        values.append((resource.RLIMIT_NPROC, MAX_THREADS))
    hard = [resource.getrlimit(limit)[1] for limit, _ in values]
    return [(n, v if top == resource.RLIM_INFINITY else min(v, top)) for (n, v), top in zip(values, hard, strict=True)]


def confine(values: list[tuple[int, int]], confinement: Confinement, orphan_dies: bool = True) -> None:
    """Apply rlimits, user, capabilities, Landlock and seccomp: from now on this process can only lose rights.

    The server has already set no_new_privs and installed its own filter.
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
    if confinement.paths is not None:
        landlock.restrict(confinement.paths)
    confinement.filter.install()


@dataclass(frozen=True)
class ProgramJob:
    """A request, prepared before the fork: work done in a fork costs it page faults.

    fds: payload, then stdin, stdout, stderr of a script or else the channel.
    """

    kind: bytes
    limits: Limits
    cpu_s: float
    rlimits: list[tuple[int, int]]
    fds: list[int]


def prepare(message: bytes, fds: list[int], confinement: Confinement) -> ProgramJob:
    """Read a request's kind and limits from its `message` and return the job of the program behind the descriptors `fds`."""
    return ProgramJob(*_parse_request(message, confinement.uid is not None), fds)


@lru_cache(maxsize=64)
def _parse_request(message: bytes, threads: bool) -> tuple[bytes, Limits, float, list[tuple[int, int]]]:
    kind, limits = message[:1], Limits.unpack(message[1:])
    cpu_s = limits.cpu_s + (
        kind == OFFICIAL_REQUEST
    )  # here the harness' alarm comes first, and the program may handle it
    return kind, limits, cpu_s, rlimits(limits, cpu_s, threads)


def warm_up() -> None:
    """Run in the server what every run begins with, so that no fork has to copy the memory pages that this changes."""
    source = b"from typing import List\ndef f(a: List[int]) -> int:\n    'text'\n    return [b for b in a if b]\nf([1])"
    local, remote = socket.socketpair()
    for _ in range(50):
        wire.send_frame(local.fileno(), codec.dumps({"value": codec.pack([1])}, 99))
        codec.loads(wire.receive_frame(remote.fileno(), 99))
        fd = wire.payload(source, b"f")
        program, _ = wire.read_payload(fd)
        os.close(fd)
        exec(compile(wire.text(program), "<rehearsal>", "exec", dont_inherit=True), {})
        codec.unpack(codec.loads(codec.dumps(codec.pack([1, (2, "3"), {4: 5.0}]), 99)), 99)
    local.close()
    remote.close()


def become(job: ProgramJob, ready: int, confinement: Confinement) -> None:
    """Turn this forked process into the run. A byte is written to `ready` once it is confined, before the program starts."""
    program, *blobs = wire.read_payload(job.fds[0])
    os.setsid()
    descriptors = job.fds[1:]
    if job.kind != RUN_REQUEST:
        # Opened here and not in the server: flags that a program sets on a descriptor of the server would outlive the
        # run.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        descriptors = [null, null, null, *descriptors]
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number, inheritable=False)
    first_free = CHANNEL if job.kind == RUN_REQUEST else CHANNEL + 1
    statistics = _open_file("/proc/self/schedstat") if job.kind == OFFICIAL_REQUEST else None
    os.chdir(confinement.work)
    confine(job.rlimits, confinement)
    os.write(ready, b".")
    if statistics is not None:  # only now, because confining needs descriptors that may have this number
        os.dup2(statistics, official.STATISTICS_FD, inheritable=False)
        first_free = official.STATISTICS_FD + 1
    kernel.close_from(first_free)
    random.seed()
    gc.enable()
    sys.path.insert(0, "")
    source = wire.text(program)
    if job.kind == RUN_REQUEST:
        for name, content in zip(blobs[::2], blobs[1::2], strict=True):
            _write(wire.text(name), content)
        run_script(source)
    elif job.kind == OFFICIAL_REQUEST:
        unbuffered = os.fdopen(CHANNEL, "wb", 0)
        official.unsafe_execute(
            source, job.limits.cpu_s, job.limits.max_wall_s, official.OfficialResult(unbuffered.write)
        )
    else:
        answer_calls(source, wire.text(blobs[0]), job.limits.frame_bytes, job.kind == IN_PLACE_REQUEST)
    os._exit(0)


def _open_file(path: str) -> int | None:
    """Return a descriptor of a file to read; None if the host has no such file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _write(name: str, content: bytes) -> None:
    folder = os.path.dirname(name)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(name, "wb") as file:
        file.write(content)


def run_script(program: str) -> None:
    """Run a program as `python -c` does.

    This holds for `__main__`, argv, buffering, tracebacks and exit status; threads are joined and atexit is run.
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
    status = _status(lambda: exec(compile(program, "<string>", "exec", dont_inherit=True), main.__dict__), 2)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main.__dict__.clear()
    flushed = _status(lambda: sys.stdout.flush() if sys.stdout and not sys.stdout.closed else None, 1)
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(status or (120 if flushed else 0))


def _status(body: Callable[[], object], frames: int) -> int:
    """Return the exit status that the interpreter would give, and print its traceback.

    The traceback lacks the sandbox's own frames.
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
        for _ in range(frames):
            trace = trace.tb_next if trace else None
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _describe_error(error: BaseException) -> list[object]:
    """Return the name of an error's nearest built-in class, its text, and the arguments of a built-in one.

    The program may have forged all of them.
    """
    class_name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    text, args = "", None
    with contextlib.suppress(Exception):
        text = str(error)[:1000]
    if type(error).__module__ == "builtins":
        with contextlib.suppress(Exception, codec.ForeignTypeError, wire.MalformedMessageError):
            packed = codec.pack(list(error.args), max_items=_MAX_ARGS_LENGTH)
            codec.dumps(packed, _MAX_ARGS_LENGTH)
            args = packed
    return [class_name, text, args]


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the answer that a judge gets if a call raised an exception."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return {"exit": type(error).__name__}
    if isinstance(error, codec.ForeignTypeError):
        return {"foreign": str(error)}
    if isinstance(error, wire.MalformedMessageError):
        return {"encode": str(error)}
    return {"error": _describe_error(error)}


def answer_calls(program: str, entry_point: str, frame_bytes: int, in_place: bool) -> None:
    """Load a candidate and answer the judge's calls.

    Requests are `{"call": [arguments, named]}` and `{"next": [number of a handed-over iterator, most items]}`. The
    candidate may forge every answer, so the judge trusts none.
    """
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    iterators: list[Any] = []

    def stream(iterator: object) -> int:
        iterators.append(iterator)
        return len(iterators) - 1

    def pack(value: object) -> object:
        return codec.pack(value, stream, frame_bytes // 2)

    def iterate(items: list[Any]) -> object:
        return iter([codec.unpack(item, _ANY_SIZE, iterate) for item in items])

    def load() -> dict[str, object]:
        exec(compile(program, "<candidate>", "exec", dont_inherit=True), module.__dict__)
        if not callable(module.__dict__.get(entry_point)):
            raise NameError(f"name {entry_point!r} is not defined")
        return {"value": None}

    def call(packed: list[Any], packed_named: dict[str, Any]) -> dict[str, object]:
        arguments = [codec.unpack(item, _ANY_SIZE, iterate) for item in packed]
        named = {key: codec.unpack(item, _ANY_SIZE, iterate) for key, item in packed_named.items()}
        try:
            answer = {"value": pack(module.__dict__[entry_point](*arguments, **named))}
        except BaseException as error:
            answer = _failure(error)
        if not in_place:
            return answer
        changed = {}
        before: dict[Any, Any] = {**dict(enumerate(packed)), **packed_named}
        for key, item in [*enumerate(arguments), *named.items()]:
            if codec.mutable(item):
                after = pack(item)
                if after != before[key]:
                    changed[str(key)] = after
        return answer | {"changed": changed}

    def following(number: int, most: int) -> dict[str, object]:
        items: list[Any] = []
        try:
            for _ in range(most):
                items.append(pack(next(iterators[number])))
        except StopIteration:
            return {"items": items, "done": True}
        except BaseException as error:
            return {"items": items, **_failure(error)}
        return {"items": items}

    def attempt(body: Callable[..., dict[str, object]], *request: object) -> None:
        try:
            data = codec.dumps(body(*request), frame_bytes)
        except BaseException as error:
            data = codec.dumps(_failure(error), frame_bytes)
        wire.send_frame(CHANNEL, data)

    attempt(load)
    while True:
        try:
            ((what, request),) = codec.loads(wire.receive_frame(CHANNEL, _ANY_SIZE)).items()
        except EOFError:
            os._exit(0)
        attempt(call if what == "call" else following, *request)
