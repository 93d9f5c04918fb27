"""Lines on disk that outlive their process: append-only files, each locked by the process that owns it.

The lock (flock) is the kernel's: it goes with the process, however that ends. Whoever locks the file of a dead process
owns it from then on, so a file has one owner at most. A process killed in mid-write leaves a last line without an end,
which nobody reads.
"""

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import sqlalchemy as sa

from marl_ray.errors import MarlRayError, one_line

SEGMENT_BYTES = 8_000_000
CHUNK_BYTES = 200_000
"""Bytes of a segment that are read at a time, about a thousand exposures; a longer line is torn, and so not
readable."""
PREFIX, SUFFIX = "exposures-", ".jsonl"

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Segment:
    """One append-only file, open and locked."""

    path: Path
    fd: int
    size: int
    """Bytes of whole writes."""
    read: int = 0
    """Bytes that need not be read again."""

    @classmethod
    def create(cls, folder: Path, prefix: str, suffix: str) -> "Segment":
        """A new file of this process in the folder. Raises OSError."""
        while True:
            path = folder / f"{prefix}{os.getpid()}-{secrets.token_hex(8)}{suffix}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            if _locked(fd):  # else another process has just taken the empty file for a dead one's
                return cls(path, fd, 0)
            os.close(fd)

    @classmethod
    def adopt(cls, path: Path) -> "Segment | None":
        """The file of a dead process, now this one's; None if its owner lives or it is gone. Raises OSError."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return None
        if _locked(fd):
            return cls(path, fd, os.fstat(fd).st_size)
        os.close(fd)
        return None

    def append(self, data: bytes) -> None:
        """Write all of the data or, with OSError, nothing of it."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)

    def remove(self) -> None:
        """Delete the file, then let go of it."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def _locked(fd: int) -> bool:
    """Lock an open file; False if another has it, or had it and deleted it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a segment, and where they end."""

    segment: Segment
    lines: list[bytes]
    end: int


def spool_folder(folder: str, database: str) -> str:
    """The folder within `folder` for the exposures of one database (an SQLAlchemy URL): what a gateway leaves behind must
    not be adopted by one that writes to another database."""
    shown = sa.make_url(database).render_as_string(hide_password=True)
    return str(Path(folder) / blake2b(shown.encode(), digest_size=8).hexdigest())


class Spool:
    """The segments of one replica. Not safe to use from several threads at once.

    The folder is on a disk of the machine (flock), and is as lasting as that disk: every append is synced.
    """

    def __init__(self, folder: str, limit_bytes: int):
        """Make the folder if need be; MarlRayError if it cannot be written to. All segments of this replica together,
        adopted ones too, grow to `limit_bytes` at most."""
        self._folder = Path(folder)
        self._limit = limit_bytes
        self._own: list[Segment] = []
        self._adopted: list[Segment] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            Segment.create(self._folder, PREFIX, SUFFIX).remove()
        except OSError as error:
            raise MarlRayError(f"spool: folder {folder!r} cannot be written to: {one_line(error)}") from error

    @property
    def size(self) -> int:
        """Bytes that wait here."""
        return sum(segment.size - segment.read for segment in self._segments())

    def append(self, lines: list[bytes]) -> int:
        """Store as many of the lines (without their ends) as fit, from the first on; returns how many. OSError if the disk
        fails; nothing is stored then."""
        room = self._limit - sum(segment.size for segment in self._segments())
        fitting = 0
        while fitting < len(lines) and room > len(lines[fitting]):
            room -= len(lines[fitting]) + 1
            fitting += 1
        if fitting:
            if not self._own or self._own[-1].size >= SEGMENT_BYTES:
                self._own.append(Segment.create(self._folder, PREFIX, SUFFIX))
            self._own[-1].append(b"\n".join(lines[:fitting]) + b"\n")
            os.fsync(self._own[-1].fd)
        return fitting

    def adopt(self) -> None:
        """Take over every segment that a dead process left in the folder. Raises OSError."""
        known_paths = {segment.path for segment in self._segments()}
        for path in sorted(self._folder.glob(f"{PREFIX}*{SUFFIX}")):
            segment = None if path in known_paths else Segment.adopt(path)
            if segment is not None:
                _log.warning("exposures of a dead process: %s, %d bytes", path, segment.size)
                self._adopted.append(segment)

    def peek(self, adopted: bool = False) -> Chunk | None:
        """The oldest lines here, of this process or of those it adopted from; None if there are none. OSError if the disk
        fails."""
        segments = self._adopted if adopted else self._own
        if not segments:
            return None
        segment = segments[0]
        data = os.pread(segment.fd, min(CHUNK_BYTES, segment.size - segment.read), segment.read)
        end = segment.read + len(data)
        if not data or end >= segment.size:  # a last line without its end was being written when its process died
            data, end = data[: data.rfind(b"\n") + 1], segment.size
        elif b"\n" in data:
            data = data[: data.rindex(b"\n") + 1]
            end = segment.read + len(data)
        return Chunk(segment, [line for line in data.split(b"\n") if line], end)

    def done(self, chunk: Chunk) -> None:
        """The chunk is where it belongs; a segment of which nothing is left is deleted."""
        segment = chunk.segment
        segment.read = chunk.end
        if segment.read >= segment.size:
            (self._own if segment in self._own else self._adopted).remove(segment)
            segment.remove()

    def close(self) -> None:
        """Let go of what is left; the next process adopts it."""
        for segment in self._segments():
            os.close(segment.fd)
        self._own, self._adopted = [], []

    def _segments(self) -> Iterator[Segment]:
        yield from self._own
        yield from self._adopted
