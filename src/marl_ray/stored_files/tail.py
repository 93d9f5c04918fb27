"""Read the lines of a file that grows, by their numbers.

A line that was removed and written again has the same number.
"""

import os
from pathlib import Path

from pyarrow import fs

from marl_ray.stored_files.appended_file import parts_of

CHUNK = 2**20
"""Bytes that are read at a time, and so the maximum length of a line."""


class Tail:
    """A reader of an `AppendedFile` of another process. Each thread has its own."""

    def __init__(self, filesystem: fs.FileSystem, path: str):
        self.filesystem, self.path = filesystem, path
        self.is_local = isinstance(filesystem, fs.LocalFileSystem)
        self.poll_s = 0.5 if self.is_local else 3.0
        """Seconds that a reader waits between two looks."""
        self.handle: int | None = None
        self.number = self.offset = 0
        """Lines, and bytes, that were read of the open file."""
        self.listed: list[tuple[str, int, int | None]] = []
        """(path, bytes, time of change) of the parts on remote storage that had no further line."""

    def read(self, after: int, max_lines: int = 1000) -> list[str]:
        """Return the complete lines that follow the first `after` ones, at most about `max_lines`.

        The list is empty while there are none. Raises OSError.
        """
        return self._read_file(after, max_lines) if self.is_local else self._read_parts(after, max_lines)

    def count(self) -> int:
        """Return the number of complete lines now. Raises OSError."""
        count = 0
        while lines := self.read(count):
            count += len(lines)
        return count

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def _read_file(self, after: int, max_lines: int) -> list[str]:
        """Read as `read` does, from a local file, which stays open."""
        try:
            status = Path(self.path).stat()
        except FileNotFoundError:
            return []
        # Workers that start again replace the file. As long as it is open here, no other file gets its inode number.
        if self.handle is None or os.fstat(self.handle).st_ino != status.st_ino:
            self.close()
            self.handle = os.open(self.path, os.O_RDONLY)
            self.number = self.offset = 0
        if after < self.number:
            self.number = self.offset = 0
        lines: list[str] = []
        while len(lines) < max_lines:
            data = os.pread(self.handle, CHUNK, self.offset)
            *complete, _ = data.split(b"\n")
            if not complete and len(data) == CHUNK:
                raise OSError(f"{self.path}: expected lines of less than {CHUNK} bytes")
            for line in complete:
                if len(lines) == max_lines:
                    break
                self.number, self.offset = self.number + 1, self.offset + len(line) + 1
                if self.number > after:
                    lines.append(line.decode(errors="replace"))
            if len(data) < CHUNK:
                break
        return lines

    def _read_parts(self, after: int, max_lines: int) -> list[str]:
        """Read as `read` does, from the parts in which remote storage holds a file."""
        parts = parts_of(self.filesystem, self.path)
        listed = [(info.path, info.size, info.mtime_ns) for info in parts]
        if listed == self.listed and after == self.number:
            return []
        lines: list[str] = []
        firsts = [int(info.base_name) for info in parts]
        for first, following, info in zip(firsts, [*firsts[1:], None], parts, strict=True):
            if (following is not None and following <= after) or len(lines) >= max_lines:
                continue
            with self.filesystem.open_input_stream(info.path) as stream:
                content = bytes(stream.read()).decode(errors="replace").split("\n")[:-1]
            lines += content[max(0, after - first) :]
            if first + len(content) != following:
                break  # the last part, or one from which lines are being removed
        if not lines:
            self.listed, self.number = listed, after
        return lines
