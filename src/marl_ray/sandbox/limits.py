"""Limits of a run, and its results."""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from numbers import Integral


class Level(IntEnum):
    """Levels of confinement. Each level includes everything of the levels below it."""

    LIMITS = 1
    """rlimits, no_new_privs, no capabilities, a seccomp filter, and another user where the host lets us change user."""
    PATHS = 2
    """Adds Landlock: of the file system only the standard library (read) and the run's own folder."""
    NAMESPACES = 3
    """Adds own process, network, IPC and mount namespaces: read-only file system, size-limited folder, empty /proc."""


class Status(StrEnum):
    """The end of a run, the first that applies of TIMEOUT, OUTPUT_LIMIT, OOM, CRASH, EXIT and OK."""

    OK = "ok"
    """The run ended with exit status 0."""
    EXIT = "exit"
    """The run ended with an exit status other than 0."""
    CRASH = "crash"
    """A signal killed the run."""
    TIMEOUT = "timeout"
    """The run passed the CPU limit or the wall-clock limit."""
    OOM = "oom"
    """A MemoryError ended the run."""
    OUTPUT_LIMIT = "output_limit"
    """The run wrote more to stdout or stderr, or into its folder, than it may."""


WALL_FACTOR = 4.0
"""Default ratio of the wall-clock limit to the CPU limit; above 1 because a busy machine makes programs wait."""

MIN_MEMORY_BYTES = 1 << 26
"""Minimum of `Limits.memory_bytes` that configs and tools take: the interpreter itself takes about 40 MB of it."""
MAX_MEMORY_BYTES = 1 << 48
"""Maximum of `Limits.memory_bytes` that configs and tools take: no process of Linux has more addresses unless it asks for
them, 47 bits on x86-64 and 48 on arm64 (arch/x86/x86_64/mm.rst and arch/arm64/memory.rst of the kernel's Documentation)."""
MAX_RUN_S = 1 << 21
"""Maximum seconds of a run, 24 days: poll(2) takes milliseconds, in 31 bits."""
MAX_SIZE = 1 << 62
"""Maximum of every size in `Limits`: setrlimit of Python takes 63 bits, and a judge adds the memory that it takes itself."""


def check_memory(name: str, value: object) -> None:
    """Raise ValueError naming the option if its value is no memory that a program can be limited to; a bool is none."""
    memory_bytes = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else 0
    if not MIN_MEMORY_BYTES <= memory_bytes <= MAX_MEMORY_BYTES:
        raise ValueError(
            f"{name}={value!r}, expected a whole number of bytes, at least 64 MiB ({MIN_MEMORY_BYTES:,}) and at most "
            f"256 TiB ({MAX_MEMORY_BYTES:,})"
        )


@dataclass(frozen=True)
class Limits:
    """Limits of one run. Raises ValueError naming the limit that is out of its range."""

    cpu_s: float = 3.0
    """Seconds of CPU time, all threads together; 3 is the timeout of openai/human-eval's harness. A judged program's tests
    have as many again for themselves."""
    wall_s: float | None = None
    """Seconds of wall-clock time, for programs that wait instead of computing; `WALL_FACTOR` times `cpu_s` if None."""
    memory_bytes: int = 1 << 30
    """Address space, about 40 MB of which the interpreter takes. A judged program's tests may use as much again."""
    output_bytes: int = 1 << 16
    """Size of what is written to stdout, and of what is written to stderr: as much as a pipe of Linux holds, pipe(7)."""
    file_bytes: int = 64 << 20
    """Size of the largest file."""
    open_files: int = 64
    """Number of descriptors that are open at once, stdin, stdout and stderr among them."""
    stack_bytes: int | None = None
    """Stack of the main thread, and of each new one; the host's default if None."""
    frame_bytes: int = 32 << 20
    """Size of one call's arguments, of its answer, and of all items of an iterator, between candidate and tests."""

    _FORMAT = struct.Struct("<ddQQQQQ")

    def __post_init__(self) -> None:
        for name, seconds in {"cpu_s": self.cpu_s, "wall_s": self.max_wall_s}.items():
            if not 0 < seconds <= MAX_RUN_S:
                raise ValueError(f"{name}={seconds!r}, expected seconds, more than 0 and at most {MAX_RUN_S:,}")
        sizes = {
            "memory_bytes": self.memory_bytes,
            "output_bytes": self.output_bytes,
            "file_bytes": self.file_bytes,
            "open_files": self.open_files,
            "stack_bytes": self.stack_bytes or 0,
            "frame_bytes": self.frame_bytes,
        }
        for name, size in sizes.items():
            if not (isinstance(size, Integral) and 0 <= size <= MAX_SIZE):
                raise ValueError(f"{name}={size!r}, expected a whole number from 0 to {MAX_SIZE:,}")

    @property
    def max_wall_s(self) -> float:
        """Wall-clock limit of the run, in seconds."""
        return WALL_FACTOR * self.cpu_s if self.wall_s is None else self.wall_s

    def pack(self) -> bytes:
        """Return the encoding in which servers and judges receive limits."""
        sizes = self.memory_bytes, self.file_bytes, self.open_files, self.stack_bytes or 0, self.frame_bytes
        return self._FORMAT.pack(self.cpu_s, self.max_wall_s, *sizes)

    @classmethod
    def unpack(cls, data: bytes) -> "Limits":
        """Undo `pack`; `output_bytes` concerns the client alone and is not sent."""
        cpu, wall, memory, file, files, stack, frame = cls._FORMAT.unpack(data)
        return cls(cpu, wall, memory, file_bytes=file, open_files=files, stack_bytes=stack or None, frame_bytes=frame)


@dataclass(frozen=True)
class Execution:
    """Result of a program."""

    status: Status
    """The way in which the run ended."""
    returncode: int | None
    """Its exit status; None if a signal ended it."""
    stdout: bytes
    """The bytes that it wrote to stdout, truncated at `output_bytes` of its limits."""
    stderr: bytes
    """The bytes that it wrote to stderr, truncated in the same way."""
    wall_s: float
    """Its duration in seconds."""
    cpu_s: float
    """The CPU seconds of all its threads."""
    level: Level
    """The level at which it was confined."""


@dataclass(frozen=True)
class Judgement:
    """Verdict of the tests on a candidate."""

    passed: bool
    """True if the verdict is `passed`."""
    verdict: str
    """`passed`, `fail:wrong` (an assertion), `fail:error` (an exception), `fail:exit`, `fail:crash`, `fail:nonbuiltin` (a
    value would have had to cross that may not), `fail:encode` (a value is too deep, too large or malformed), `timeout` or
    `oom`."""
    message: str
    """Further details, at most 2,000 bytes of UTF-8."""
    wall_s: float
    """The candidate's duration in seconds."""
    cpu_s: float
    """The candidate's CPU seconds."""
    level: Level
    """The level at which the candidate was confined."""
