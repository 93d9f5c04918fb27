"""Files of lines that grow while other processes read them, on any storage.

Local storage appends. Object stores take whole objects alone: there the lines lie in parts NAME, NAME.000001, ..., of which
the last is written anew with each addition until it holds PART bytes. So an addition costs the same however many lines there
are. A process that is killed leaves at most one line that is cut, which readers and the next writer drop.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from pyarrow import fs

from marl_ray.tuning.folder import Folder

PART = 1 << 18
"""Bytes after which a part on an object store is followed by another."""
ROWS = "rows.jsonl"
"""File of a trial's metrics, a row per iteration."""


class Lines:
    """Appends lines to a file. Only one process may write it. Errors of the storage are raised as OSError."""

    def __init__(self, folder: Folder, name: str):
        """Continue the file, if there is one, without a last line that was cut."""
        self.folder, self.name = folder, name
        self.local = isinstance(folder.filesystem, fs.LocalFileSystem)
        self.part = 0
        """Number of the last part."""
        while not self.local and folder.exists(_part(name, self.part + 1)):
            self.part += 1
        content = _content(folder, _part(name, self.part)) or b""
        self.tail = content[: content.rfind(b"\n") + 1]
        """Content of the last part on an object store; of a local file nothing is held."""
        if self.local:
            if self.tail != content:
                os.truncate(self._path, len(self.tail))
            self.tail = b""

    def append(self, lines: Iterable[str], durable: bool = True) -> int:
        """Append lines, which have no line ends: all of them or, with an OSError, none. Returns the number of bytes.

        They survive the death of this process; `durable` ones survive that of the machine too.
        """
        data = "".join(f"{line}\n" for line in lines).encode()
        if not data:
            return 0
        if self.local:
            self._append(data, durable)
            return len(data)
        if len(self.tail) >= PART:
            self.folder.write(_part(self.name, self.part + 1), data)
            self.part, self.tail = self.part + 1, data
        else:
            self.folder.write(_part(self.name, self.part), self.tail + data)
            self.tail += data
        return len(data)

    def keep(self, count: int) -> None:
        """Keep the first `count` lines and remove the others. A reader, and a process that is killed meanwhile, leave or see
        some first lines, at least `count`."""
        part, before, content = 0, 0, b""
        for part in range(self.part + 1):
            content = _content(self.folder, _part(self.name, part)) or b""
            if before + content.count(b"\n") >= count:
                break
            before += content.count(b"\n")
        kept = b"".join(content.splitlines(keepends=True)[: count - before])
        for number in range(self.part, part, -1):
            self.folder.filesystem.delete_file(f"{self.folder.path}/{_part(self.name, number)}")
            self.part = number - 1
        if kept != content:
            self.folder.write(_part(self.name, part), kept)
        self.part, self.tail = part, b"" if self.local else kept

    @property
    def _path(self) -> Path:
        return Path(self.folder.path, self.name)

    def _append(self, data: bytes, durable: bool) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(f"{self._path} could not be written; is the disk full?")
                if durable:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


class LinesReader:
    """Reads a file of lines that another process may be writing."""

    def __init__(self, folder: Folder, name: str):
        self.folder, self.name = folder, name
        self.remote = not isinstance(folder.filesystem, fs.LocalFileSystem)
        self.part = self.offset = 0

    def read(self) -> list[str]:
        """The lines since the last call that are complete; raises OSError."""
        lines: list[str] = []
        while True:
            followed = self.remote and self.folder.exists(_part(self.name, self.part + 1))  # then this part is complete
            content = _content(self.folder, _part(self.name, self.part), self.offset) or b""
            complete = content[: content.rfind(b"\n") + 1]
            self.offset += len(complete)
            lines += complete.decode().split("\n")[:-1]
            if not followed:
                return lines
            self.part, self.offset = self.part + 1, 0


def read_lines(folder: Folder, name: str) -> list[str]:
    """All complete lines of a file; empty where there is none."""
    return LinesReader(folder, name).read()


def read_rows(folder: Folder) -> list[dict[str, float]]:
    """The rows of a trial's folder; raises OSError, and ValueError for lines that are no JSON."""
    return [json.loads(line) for line in read_lines(folder, ROWS)]


def _part(name: str, number: int) -> str:
    return f"{name}.{number:06d}" if number else name


def _content(folder: Folder, name: str, offset: int = 0) -> bytes | None:
    """Content of a file from an offset; None if there is no such file."""
    try:
        with folder.filesystem.open_input_file(f"{folder.path}/{name}") as file:
            if offset:
                file.seek(min(offset, file.size()))
            return bytes(file.read())
    except FileNotFoundError:
        return None
