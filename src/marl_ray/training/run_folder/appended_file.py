"""A text file that grows by lines while a run goes on, on any storage."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pyarrow import fs

UPLOAD_S = 30.0
"""Least seconds between two uploads of a file to remote storage, which takes whole files alone."""


class AppendedFile:
    """Appends lines to a file and removes lines from it.

    Object stores cannot append. For these the file grows in a temporary folder of this machine; it is uploaded at most
    every UPLOAD_S seconds, and when it is closed.
    """

    def __init__(self, filesystem: fs.FileSystem, path: str):
        """Continue the file at `path`, if there is one, without a last line that was cut. Raises OSError."""
        self.filesystem, self.path = filesystem, path
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.uploaded, self.changed = float("-inf"), False
        if isinstance(filesystem, fs.LocalFileSystem):
            self.local = Path(path)
        else:
            self.folder = tempfile.TemporaryDirectory(prefix="marl-ray-")
            self.local = Path(self.folder.name, Path(path).name)
            if filesystem.get_file_info(path).type == fs.FileType.File:
                with filesystem.open_input_stream(path) as stream:
                    self.local.write_bytes(stream.read())
        _remove_cut_line(self.local)

    def append(self, lines: Iterable[str]) -> None:
        """Append lines, which have no line ends: all of them or, with an OSError, none."""
        data = "".join(f"{line}\n" for line in lines).encode()
        if not data:
            return
        self.local.parent.mkdir(parents=True, exist_ok=True)
        with self.local.open("ab", buffering=0) as stream:
            size = stream.tell()
            try:
                written = stream.write(data)
            except OSError:
                written = 0
            if written != len(data):
                stream.truncate(size)
                raise OSError(f"{self.local} could not be written; is the disk full?")
        self._upload_if_due()

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Keep the lines that are wanted, and remove the others; raises OSError."""
        lines = self.local.read_text().splitlines() if self.local.exists() else []
        kept = [line for line in lines if wanted(line)]
        if len(kept) == len(lines):
            return
        temporary = self.local.with_name(f".{self.local.name}.{os.getpid()}")
        try:
            temporary.write_text("".join(f"{line}\n" for line in kept))
            temporary.replace(self.local)  # a reader sees the old lines or the new ones
        finally:
            temporary.unlink(missing_ok=True)
        self._upload_if_due()

    def close(self) -> None:
        """Upload what is not uploaded yet; raises OSError. A local file is complete after every call."""
        if self.folder is None:
            return
        if self.changed:
            self._upload()
        self.folder.cleanup()

    def _upload_if_due(self) -> None:
        self.changed = True
        if self.folder is not None and time.monotonic() - self.uploaded > UPLOAD_S:
            with contextlib.suppress(OSError):  # the lines are safe here, and the next upload has them too
                self._upload()

    def _upload(self) -> None:
        self.uploaded = time.monotonic()
        with self.filesystem.open_output_stream(self.path) as stream:
            stream.write(self.local.read_bytes())
        self.changed = False


def _remove_cut_line(path: Path) -> None:
    """A process that was killed while it wrote leaves a line without an end."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)
