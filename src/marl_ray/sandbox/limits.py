"""What a run may use, and what is known about it afterwards."""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Level(IntEnum):
    """How a run is confined. Each level has everything of the ones below it."""

    LIMITS = 1
    """rlimits, no_new_privs, no capabilities, a seccomp filter, and another user where the host lets us change user."""
    PATHS = 2
    """+ Landlock: of the file system only the standard library (read) and the run's own folder."""
    NAMESPACES = 3
    """+ own process, network, IPC and mount namespaces: read-only file system, size-limited folder, empty /proc."""


class Status(StrEnum):
    """How a run ended. The first that applies, in the order TIMEOUT, OUTPUT_LIMIT, OOM, CRASH, EXIT, OK."""

    OK = "ok"
    EXIT = "exit"
    """Ended with an exit status that is not 0."""
    CRASH = "crash"
    """Killed by a signal."""
    TIMEOUT = "timeout"
    """Passed the CPU limit or the wall-clock limit."""
    OOM = "oom"
    """Died of a MemoryError."""
    OUTPUT_LIMIT = "output_limit"
    """Wrote more to stdout or stderr, or into its folder, than it may."""


WALL_FACTOR = 4.0
"""A run may take so many times its CPU limit by the clock on the wall, because a busy machine makes programs wait."""


@dataclass(frozen=True)
class Limits:
    """What one run may use. Times in seconds, sizes in bytes.

    cpu_s: CPU time of all threads together. It decides; of judged programs the tests have as much again for themselves.
    wall_s: by the clock on the wall, for programs that wait instead of computing; `WALL_FACTOR` times `cpu_s` when None.
    memory_bytes: address space, the interpreter's own (about 40 MB) included. Judged tests may use as much again.
    output_bytes: of stdout and of stderr, each.
    file_bytes: the largest file.
    stack_bytes: of the main thread, and of new threads; what the host gives when None.
    frame_bytes: one call's arguments or its answer, as they cross between candidate and tests; all items of an iterator.
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
    def longest_s(self) -> float:
        """How long the run may take by the clock on the wall."""
        return WALL_FACTOR * self.cpu_s if self.wall_s is None else self.wall_s

    def pack(self) -> bytes:
        """The form in which servers and judges get them."""
        sizes = self.memory_bytes, self.file_bytes, self.open_files, self.stack_bytes or 0, self.frame_bytes
        return self._FORMAT.pack(self.cpu_s, self.longest_s, *sizes)

    @classmethod
    def unpack(cls, data: bytes) -> "Limits":
        """The inverse of `pack`; `output_bytes` is the client's business and stays behind."""
        cpu, wall, memory, file, files, stack, frame = cls._FORMAT.unpack(data)
        return cls(cpu, wall, memory, file_bytes=file, open_files=files, stack_bytes=stack or None, frame_bytes=frame)


@dataclass(frozen=True)
class Execution:
    """What a program did. `returncode` is None when a signal ended it; stdout and stderr are cut at `output_bytes`."""

    status: Status
    returncode: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float
    level: Level


@dataclass(frozen=True)
class Judgement:
    """What the tests say of a candidate.

    verdict: passed; fail:wrong (an assertion), fail:error (an exception), fail:exit, fail:crash, fail:nonbuiltin (a value
    that may not cross had to), fail:encode (too deep, too big or malformed), timeout, oom.
    message: what else is known, at most 2,000 bytes of UTF-8.
    """

    passed: bool
    verdict: str
    message: str
    wall_s: float
    cpu_s: float
    level: Level
