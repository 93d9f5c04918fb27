"""A text file that grows by lines while a run continues, on any storage.

On a file system it is one file. Object stores cannot append: there it is a folder of parts of at most PART_BYTES, each
named by the number of its first line, and only the last part is ever written again.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from pyarrow import fs

from marl_ray.errors import one_line
from marl_ray.stored_files.durability import sync_to_disk
from marl_ray.stored_files.temporary_files import replace_file

UPLOAD_S = 3.0
"""Seconds between two uploads of lines to an object store."""
PART_BYTES = 2**20
"""Maximum bytes of a part, which is uploaded whole with every change, unless it has one line alone."""
COPY_SUFFIX = ".copied"
"""End of the name that a file has while its lines are brought into another form."""


class AppendedFile(Protocol):
    """A file to which lines are appended; they have no line ends.

    One process writes a file at a time: one that was cut off, and comes back after another has begun to write,
    gets an OSError.
    """

    def append(self, lines: Iterable[str], durable: bool = False) -> None:
        """Add lines: all of them or, with an OSError, none.

        `durable` ones are on the disk, or in the object store, when it returns; others are in a file of the disk, or
        wait for the next upload.
        """

    def keep(self, count: int) -> None:
        """Keep the first `count` lines and remove the others. Raises OSError.

        A reader meanwhile, and whoever follows a process that is killed meanwhile, has some first lines,
        at least `count`.
        """

    def flush(self) -> None:
        """Make all lines durable. Raises OSError."""

    def close(self) -> None:
        """Make all lines durable; nothing may be appended afterwards. Raises OSError."""


def appended_file(filesystem: fs.FileSystem, path: str) -> AppendedFile:
    """Continue the file at `path`, or begin it, without an incomplete last line. Raises OSError."""
    take_over_copy(filesystem, path)
    if isinstance(filesystem, fs.LocalFileSystem):
        return _LocalFile(Path(path))
    return _StoredParts(filesystem, path)


def take_over_copy(filesystem: fs.FileSystem, path: str) -> None:
    """Bring a file that was copied from storage of the other kind into the form of this one.

    The owner of the folder does so before anybody writes. Raises OSError.
    """
    copy_path = f"{path}{COPY_SUFFIX}"
    info, copy_info = filesystem.get_file_info([path, copy_path])
    foreign_type = fs.FileType.Directory if isinstance(filesystem, fs.LocalFileSystem) else fs.FileType.File
    if copy_info.type != fs.FileType.NotFound:  # a process was killed while it did this
        _delete_entry(filesystem, info)
    elif info.type == foreign_type:
        filesystem.move(path, copy_path)
    else:
        return
    replace_lines(filesystem, path, lines_of(filesystem, copy_path))
    _delete_entry(filesystem, filesystem.get_file_info(copy_path))


def _delete_entry(filesystem: fs.FileSystem, info: fs.FileInfo) -> None:
    if info.type == fs.FileType.Directory:
        filesystem.delete_dir(info.path)
    elif info.type == fs.FileType.File:
        filesystem.delete_file(info.path)


def content_of(filesystem: fs.FileSystem, path: str) -> bytes | None:
    """Return the complete lines of a file as bytes; None where there is no file. Raises OSError."""
    kind = filesystem.get_file_info(path).type
    if kind == fs.FileType.NotFound:
        return None
    content = b""
    for part in [path] if kind == fs.FileType.File else [info.path for info in parts_of(filesystem, path)]:
        try:
            content += _read_bytes(filesystem, part)
        except FileNotFoundError:  # its lines have just been removed
            break
    return content[: content.rfind(b"\n") + 1]


def lines_of(filesystem: fs.FileSystem, path: str) -> list[str]:
    """Return the complete lines of a file as text, with bytes that are no UTF-8 replaced. Raises OSError."""
    return (content_of(filesystem, path) or b"").decode(errors="replace").split("\n")[:-1]


def replace_lines(filesystem: fs.FileSystem, path: str, lines: Sequence[str]) -> None:
    """Replace the lines of a file, to which nobody writes meanwhile. Raises OSError."""
    if isinstance(filesystem, fs.LocalFileSystem):
        replace_file(Path(path), _encode_lines(lines))
        return
    old_parts = parts_of(filesystem, path)
    filesystem.create_dir(path)
    with filesystem.open_output_stream(f"{path}/{0:012d}") as stream:
        stream.write(_encode_lines(lines))
    for part in reversed(old_parts):
        if int(part.base_name):
            filesystem.delete_file(part.path)


def parts_of(filesystem: fs.FileSystem, path: str) -> list[fs.FileInfo]:
    """Return the parts of a file of an object store, in order.

    The base name of each is the number of its first line.
    """
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted((info for info in infos if info.base_name.isdigit()), key=lambda info: info.base_name)


def _read_bytes(filesystem: fs.FileSystem, path: str) -> bytes:
    with filesystem.open_input_stream(path) as stream:
        return bytes(stream.read())


def _encode_lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _first_lines(content: bytes, count: int) -> bytes:
    return b"".join(line + b"\n" for line in content.split(b"\n")[:-1][:count])


def _changed_error(path: object) -> OSError:
    return OSError(f"{path} was changed by another process; only one may write it")


class _LocalFile:
    """A file of a file system, to which lines are appended where it lies.

    A process that slept while another one took the run over must not write on. The file's inode and size tell: `keep`,
    with which every process begins, puts another file in place of the old one, and whoever finds another inode or size
    than it left gets an OSError. Without `keep`, the first `append` takes the file as it is.
    """

    def __init__(self, path: Path):
        """Remove a last line without an end, as a killed process leaves it. Raises OSError."""
        self.path = path
        self.own_file: tuple[int, int] | None = None
        """Inode and size of the file as this process left it; None before its first write."""
        self.open_file: BinaryIO | None = None
        """The file, which is open so that no other file gets its inode after this one is gone."""
        self.has_durable_name = False
        """True if this process has brought the file's name onto the disk."""
        if path.exists():
            content = path.read_bytes()
            if not content.endswith(b"\n"):  # a process was killed while it wrote
                with path.open("r+b") as stream:
                    stream.truncate(content.rfind(b"\n") + 1)

    def append(self, lines: Iterable[str], durable: bool = False) -> None:
        data = _encode_lines(lines)
        if not data:
            return
        with self.path.open("ab", buffering=0) as stream:
            inode, size = os.fstat(stream.fileno()).st_ino, stream.tell()
            if self.own_file not in (None, (inode, size)):
                raise _changed_error(self.path)
            try:
                if stream.write(data) != len(data):  # without a buffer, a full disk takes a part of the data
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if durable:
                    os.fsync(stream.fileno())
                    if not self.has_durable_name:
                        sync_to_disk(self.path.parent)
                        self.has_durable_name = True
            except OSError as error:
                stream.truncate(size)  # all lines or none
                raise OSError(f"{self.path} could not be written; is the disk full? ({one_line(error)})") from error
            self.own_file = inode, size + len(data)

    def keep(self, count: int) -> None:
        # Also where all lines stay, and where there is no file yet: it is another file then, and whoever was about to write
        # to the one before can write no more.
        replace_file(self.path, _first_lines(self.path.read_bytes() if self.path.exists() else b"", count))
        self.has_durable_name = True
        self._close_file()
        self.open_file = self.path.open("rb")
        status = os.fstat(self.open_file.fileno())
        self.own_file = status.st_ino, status.st_size

    def flush(self) -> None:
        if self.path.exists():
            sync_to_disk(self.path)
            sync_to_disk(self.path.parent)

    def close(self) -> None:
        self._close_file()
        self.flush()

    def _close_file(self) -> None:
        if self.open_file is not None:
            self.open_file.close()
            self.open_file = None


class _StoredParts:
    """A file of an object store, as a folder of parts.

    A thread of its own uploads them, so that whoever appends does not wait for the store.
    """

    def __init__(self, filesystem: fs.FileSystem, path: str):
        self.filesystem, self.path = filesystem, path
        self.lock, self.upload_lock = threading.Lock(), threading.Lock()
        self.parts: dict[int, bytes] = {0: b""}
        """Number of the first line -> content, of the last part and of those that are not uploaded yet."""
        self.has_changes = False
        self.unconfirmed_uploads: set[tuple[str, int]] = set()
        """Name and size of parts whose upload has not succeeded: the store may have them even so."""
        self.closed, self.thread = threading.Event(), threading.Thread(target=self._upload_repeatedly, daemon=True)
        stored = parts_of(filesystem, path)
        if stored:
            self.parts = {int(stored[-1].base_name): _read_bytes(filesystem, stored[-1].path)}
        self.own_part = self._stored_end()
        """Name, size and time of the last part as this process left it."""

    def append(self, lines: Iterable[str], durable: bool = False) -> None:
        data = _encode_lines(lines)
        if not data:
            return
        with self.lock:
            last = max(self.parts)
            if self.parts[last] and len(self.parts[last]) + len(data) > PART_BYTES:
                last += self.parts[last].count(b"\n")
            self.parts[last] = self.parts.get(last, b"") + data
            self.has_changes = True
        if durable:
            try:
                self.flush()
            except OSError:
                self._take_back(last, data)
                raise
        elif not self.thread.is_alive() and not self.closed.is_set():
            self.thread.start()

    def _take_back(self, part: int, data: bytes) -> None:
        """Remove lines that were just added to a part, because they could not be uploaded."""
        with self.lock:
            self.parts[part] = self.parts[part].removesuffix(data)
            if not self.parts[part] and len(self.parts) > 1:
                del self.parts[part]

    def keep(self, count: int) -> None:
        # The last part is written again also where all lines stay: whoever was about to write can write no more.
        self.flush()
        stored = parts_of(self.filesystem, self.path)
        last_parts = [info for info in stored if int(info.base_name) <= count][-1:] or stored[:1]
        for last in last_parts:
            first, content = int(last.base_name), _read_bytes(self.filesystem, last.path)
            # What follows may fail between two parts.
            self.unconfirmed_uploads |= {(info.base_name, info.size) for info in stored}
            for later in reversed(stored[stored.index(last) + 1 :]):
                self.filesystem.delete_file(later.path)
            with self.lock:
                self.parts, self.has_changes = {first: _first_lines(content, count - first)}, True
            self.flush()

    def flush(self) -> None:
        with self.upload_lock:
            with self.lock:
                parts, has_changes, self.has_changes = dict(self.parts), self.has_changes, False
            if not has_changes:
                return
            try:
                last = self._stored_end()
                if last != self.own_part and last[:2] not in self.unconfirmed_uploads:
                    raise _changed_error(self.path)
                if not self.own_part[0]:
                    self.filesystem.create_dir(self.path)
                for first, content in sorted(parts.items()):
                    self.unconfirmed_uploads.add((f"{first:012d}", len(content)))
                    with self.filesystem.open_output_stream(f"{self.path}/{first:012d}") as stream:
                        stream.write(content)
                self.own_part, self.unconfirmed_uploads = self._stored_end(), set()
            except OSError:
                with self.lock:
                    self.has_changes = True
                raise
            with self.lock:
                for first in [first for first in self.parts if first < max(parts)]:
                    del self.parts[first]

    def close(self) -> None:
        self.closed.set()
        self.flush()

    def _stored_end(self) -> tuple[str, int, int | None]:
        """Return name, size in bytes and time in nanoseconds of the last part in the store; an empty name if it has none."""
        stored = parts_of(self.filesystem, self.path)
        return (stored[-1].base_name, stored[-1].size, stored[-1].mtime_ns) if stored else ("", 0, None)

    def _upload_repeatedly(self) -> None:
        while not self.closed.wait(UPLOAD_S):
            with contextlib.suppress(OSError):  # the lines are kept here, and the next upload has them too
                self.flush()
