"""TensorBoard event files of a sweep: `tensorboard/TRIAL-LEG/` in its folder, written while the trials run."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs

from marl_ray.errors import one_line
from marl_ray.temporary_folders import new_temporary_folder
from marl_ray.training.tracking.other_sinks import EVENTS_S, TENSORBOARD, numbers
from marl_ray.tuning.folder import Folder

UPLOAD_S = 10.0
"""Least number of seconds between two uploads of a leg's file to remote storage."""


class EventFiles:
    """Writes event files: straight to a local disk; for remote storage into a temporary folder that is uploaded now and
    then."""

    def __init__(self, folder: Folder, warn: Callable[[str], None]):
        self.folder, self.warn, self.warned = folder, warn, False
        local = isinstance(folder.filesystem, fs.LocalFileSystem)
        self.scratch = None if local else new_temporary_folder("events")
        self.root = self.scratch or Path(folder.path, TENSORBOARD)
        self.writers: dict[str, Any] = {}
        self.uploaded: dict[str, float] = {}

    def log(self, leg: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Write rows of a leg, each at its environment steps."""
        self._try(lambda: self._log(leg, rows))

    def end(self, leg: str) -> None:
        """Close a leg's file; no more rows follow."""
        writer = self.writers.pop(leg, None)
        if writer is not None:
            self._try(writer.close)
            self._try(lambda: self._upload(leg))

    def close(self) -> None:
        for leg in list(self.writers):
            self.end(leg)
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _log(self, leg: str, rows: Sequence[Mapping[str, float]]) -> None:
        from tensorboardX import SummaryWriter

        if leg not in self.writers:
            # The writer names files by the second, so a continued leg could overwrite its own earlier file.
            self.writers[leg] = SummaryWriter(
                str(self.root / leg), flush_secs=EVENTS_S, filename_suffix=f".{time.time_ns()}"
            )
        for row in rows:
            for key, value in numbers(row):
                self.writers[leg].add_scalar(key, value, int(row["steps"]))
        if time.monotonic() - self.uploaded.get(leg, float("-inf")) > UPLOAD_S:
            self._upload(leg)

    def _upload(self, leg: str) -> None:
        if self.scratch is None:
            return
        self.uploaded[leg] = time.monotonic()
        for path in (self.scratch / leg).iterdir():
            self.folder.upload_file(path, f"{TENSORBOARD}/{leg}/{path.name}")

    def _try(self, action: Callable[[], None]) -> None:
        """Run an action that writes. An error of the storage becomes a warning, so that it never ends a sweep."""
        try:
            action()
        except OSError as error:
            if not self.warned:
                self.warn(f"TensorBoard's files are not complete: {one_line(error)}")
            self.warned = True
