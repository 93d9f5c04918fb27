"""Limits of a run, and its results."""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Level(IntEnum):
    """Levels of confinement. Each level includes everything of the levels below it."""

    LIMITS = 1
    """rlimits, no_new_privs, no capabilities, a seccomp filter, and another user where the host lets us change user."""
    PATHS = 2
    """Adds Landlock: of the file system only the standard library (read) and the run's own folder."""
    NAMESPACES = 3
    """Adds own process, network, IPC and mount namespaces: read-only file system, size-limited folder, empty /proc."""


class Status(StrEnum):
    """The end of a run: the first that applies, in the order TIMEOUT, OUTPUT_LIMIT, OOM, CRASH, EXIT, OK."""

    OK = "ok"
    EXIT = "exit"
    """The run ended with an exit status other than 0."""
    CRASH = "crash"
    """A signal killed the run."""
    TIMEOUT = "timeout"
    """The run passed the CPU limit or the wall-clock limit."""
    OOM = "oom"
    """The run died of a MemoryError."""
    OUTPUT_LIMIT = "output_limit"
    """The run wrote more to stdout or stderr, or into its folder, than it may."""


WALL_FACTOR = 4.0
"""Default ratio of the wall-clock limit to the CPU limit; above 1 because a busy machine makes programs wait."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run. Times are in seconds, sizes in bytes.

    cpu_s: CPU time of all threads together. It decides; of judged programs the tests have as much again for themselves.
    wall_s: wall-clock time, for programs that wait instead of computing; `WALL_FACTOR` times `cpu_s` if None.
    memory_bytes: address space, including the interpreter's own (about 40 MB). Judged tests may use as much again.
    output_bytes: size of stdout and of stderr, each.
    file_bytes: size of the largest file.
    stack_bytes: stack of the main thread, and of new threads; the host's default if None.
    frame_bytes: size of one call's arguments or of its answer between candidate and tests, and of all items of an iterator.
    """

    cpu_s: float = 3.0
    wall_s: float | None = None
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 16
    file_bytes: int = 64 << 20
    open_files: int = 64
    stack_bytes: int | None = None
    frame_bytes: int = 32 << 20

    _FORMAT = struct.Struct("<ddQQQQQ")

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
    """Result of a program. `returncode` is None if a signal ended it; stdout and stderr are cut at `output_bytes`."""

    status: Status
    returncode: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float
    level: Level


@dataclass(frozen=True)
class Judgement:
    """Verdict of the tests on a candidate.

    verdict: passed; fail:wrong (an assertion), fail:error (an exception), fail:exit, fail:crash, fail:nonbuiltin (a value
    that may not cross had to), fail:encode (too deep, too big or malformed), timeout, oom.
    message: further details, at most 2,000 bytes of UTF-8.
    """

    passed: bool
    verdict: str
    message: str
    wall_s: float
    cpu_s: float
    level: Level
