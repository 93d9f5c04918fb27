"""Lines on disk that outlive their process, in append-only files that their owner has locked.

The kernel releases the lock (flock) when its process ends in any way. A process that locks the file of a dead one owns
it from then on, so a file has at most one owner. A process that is killed while it writes leaves an incomplete last
line, which readers skip.
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
from marl_ray.stored_files.durability import create_local_folder, sync_to_disk

SEGMENT_BYTES = 8_000_000
"""Size at which a new segment begins."""
CHUNK_BYTES = 200_000
"""Bytes of a segment that are read at a time, about a thousand exposures; a longer line counts as damaged."""
PREFIX, SUFFIX = "exposures-", ".jsonl"

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Segment:
    """One append-only file, open and locked."""

    path: Path
    fd: int
    """Descriptor of the file, whose lock ends with it."""
    size: int
    """Bytes of complete writes."""
    read: int = 0
    """Bytes that have been read and delivered."""

    @classmethod
    def create(cls, folder: Path, prefix: str, suffix: str) -> "Segment":
        """Create a file of this process in the folder, whose name outlasts a loss of power. Raises OSError."""
        while True:
            path = folder / f"{prefix}{os.getpid()}-{secrets.token_hex(8)}{suffix}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            if not _try_lock(fd):  # another process has just adopted the empty file
                os.close(fd)
                continue
            segment = cls(path, fd, 0)
            try:
                sync_to_disk(folder)
            except OSError:
                segment.remove()
                raise
            return segment

    @classmethod
    def adopt(cls, path: Path) -> "Segment | None":
        """Adopt the file of a dead process; None if its owner lives or the file is gone. Raises OSError."""
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        if _try_lock(fd):
            return cls(path, fd, os.fstat(fd).st_size)
        os.close(fd)
        return None

    def append(self, data: bytes, durable: bool = False) -> None:
        """Write the data behind what was written: all of it or, with an OSError, none.

        A `durable` write is on the disk when it returns.
        """
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self.fd, memoryview(data)[written:], self.size + written)
            if durable:
                os.fsync(self.fd)
        except OSError:
            with contextlib.suppress(OSError):  # else the next write is in its place
                os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)

    def remove(self) -> None:
        """Delete the file, then release it."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def _try_lock(fd: int) -> bool:
    """Lock an open file. Return False if another process has locked it, or deleted it before this one did."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


@dataclass(frozen=True)
class Chunk:
    """Complete lines of a segment."""

    segment: Segment
    lines: list[bytes]
    """The lines, without line breaks."""
    end: int
    """Position in the segment after the last line, in bytes."""


def spool_folder(folder: str, database: str) -> str:
    """Return the folder within `folder` for the exposures of one database (an SQLAlchemy URL).

    A gateway that writes to another database must not adopt them.
    """
    shown = sa.make_url(database).render_as_string(hide_password=True)
    return str(Path(folder) / blake2b(shown.encode(), digest_size=8).hexdigest())


class Spool:
    """The segments of one replica, not safe to use from several threads at once.

    The folder is on a disk of the machine (flock), and is as lasting as that disk: every append is synced.
    """

    def __init__(self, folder: str, limit_bytes: int):
        """Create the folder if it is missing.

        All segments of this replica together, adopted ones too, grow to `limit_bytes` at most. Raises MarlRayError if
        the folder cannot be written to.
        """
        self._folder = Path(folder)
        self._limit = limit_bytes
        self.own_segments: list[Segment] = []
        """Segments that this process has begun, the oldest first."""
        self._adopted: list[Segment] = []
        try:
            create_local_folder(self._folder)
            Segment.create(self._folder, PREFIX, SUFFIX).remove()
        except OSError as error:
            raise MarlRayError(f"spool: folder {folder!r} cannot be written to: {one_line(error)}") from error

    @property
    def size(self) -> int:
        """Bytes that are not delivered yet."""
        return sum(segment.size - segment.read for segment in self._segments())

    def append(self, lines: list[bytes]) -> int:
        """Store as many of the lines as fit, from the first on, and return how many.

        The lines have no line breaks. Raises OSError if the disk fails, and stores nothing then.
        """
        room = self._limit - sum(segment.size for segment in self._segments())
        fitting = 0
        while fitting < len(lines) and room > len(lines[fitting]):
            room -= len(lines[fitting]) + 1
            fitting += 1
        if fitting:
            if not self.own_segments or self.own_segments[-1].size >= SEGMENT_BYTES:
                self.own_segments.append(Segment.create(self._folder, PREFIX, SUFFIX))
            self.own_segments[-1].append(b"\n".join(lines[:fitting]) + b"\n", durable=True)
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
        """Return the oldest lines of this process, or of adopted segments; None if there are none.

        Raises OSError if the disk fails.
        """
        segments = self._adopted if adopted else self.own_segments
        if not segments:
            return None
        segment = segments[0]
        data = os.pread(segment.fd, min(CHUNK_BYTES, segment.size - segment.read), segment.read)
        end = segment.read + len(data)
        if not data or end >= segment.size:  # the process died while it wrote this incomplete last line
            data = data[: data.rfind(b"\n") + 1]
            end = segment.size
        elif b"\n" in data:
            data = data[: data.rindex(b"\n") + 1]
            end = segment.read + len(data)
        return Chunk(segment, [line for line in data.split(b"\n") if line], end)

    def mark_delivered(self, chunk: Chunk) -> None:
        """Note that the chunk is delivered; a segment without further lines is deleted."""
        segment = chunk.segment
        segment.read = chunk.end
        if segment.read >= segment.size:
            (self.own_segments if segment in self.own_segments else self._adopted).remove(segment)
            segment.remove()

    def close(self) -> None:
        """Release all segments; the next process adopts them."""
        for segment in self._segments():
            os.close(segment.fd)
        self.own_segments = []
        self._adopted = []

    def _segments(self) -> Iterator[Segment]:
        yield from self.own_segments
        yield from self._adopted
