"""TensorBoard event files of a sweep, which are written while its trials run.

Those of a leg are in `tensorboard/TRIAL-LEG/` of the sweep's folder. A separate thread writes them, because the files
of a leg take ten milliseconds, and a slow disk any time.
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from marl_ray.errors import one_line
from marl_ray.temporary_folders import new_temporary_folder
from marl_ray.training.tracking.sinks import EVENTS_S, TENSORBOARD, finite_metrics
from marl_ray.tuning.folder import Folder

MIN_UPLOAD_INTERVAL_S = 10.0
"""Minimum number of seconds between two uploads of a leg's file to remote storage."""
CLOSE_S = 60.0
"""Seconds that a sweep waits at its end for the files."""


class EventFiles:
    """A writer of event files, on a local disk or on remote storage.

    It writes straight to a local disk; for remote storage into a temporary folder that is uploaded now and then.
    """

    def __init__(self, folder: Folder, warn: Callable[[str], None]):
        self.folder, self.warn, self.has_warned = folder, warn, False
        self.scratch = None if folder.is_local else new_temporary_folder("events")
        self.root = self.scratch or Path(folder.path, TENSORBOARD)
        self.writers: dict[str, Any] = {}
        self.uploaded: dict[str, float] = {}
        self.waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="tensorboard", daemon=True)
        self.thread.start()

    def log(self, leg: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Write rows of a leg, each at its environment steps."""
        self.waiting.put(lambda: self._log(leg, rows))

    def end(self, leg: str) -> None:
        """Close a leg's file; no more rows follow."""
        self.waiting.put(lambda: self._end(leg))

    def close(self) -> None:
        """Write the waiting rows and close all files.

        A warning says that they are not complete if that takes longer than CLOSE_S seconds.
        """
        self.waiting.put(None)
        self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            self.warn(f"TensorBoard's files are not complete: the storage took longer than {CLOSE_S:g} s")
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _work(self) -> None:
        while (action := self.waiting.get()) is not None:
            self._try(action)
        for leg in list(self.writers):
            self._try(partial(self._end, leg))

    def _end(self, leg: str) -> None:
        writer = self.writers.pop(leg, None)
        if writer is not None:
            writer.close()
            self._upload(leg)

    def _log(self, leg: str, rows: Sequence[Mapping[str, float]]) -> None:
        from tensorboardX import SummaryWriter

        if leg not in self.writers:
            # The writer names files by the second, so a continued leg could overwrite its own earlier file.
            self.writers[leg] = SummaryWriter(
                str(self.root / leg), flush_secs=EVENTS_S, filename_suffix=f".{time.time_ns()}"
            )
        for row in rows:
            for key, value in finite_metrics(row):
                self.writers[leg].add_scalar(key, value, int(row["steps"]))
        if time.monotonic() - self.uploaded.get(leg, float("-inf")) > MIN_UPLOAD_INTERVAL_S:
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
        except Exception as error:
            if not self.has_warned:
                self.warn(f"TensorBoard's files are not complete: {one_line(error)}")
            self.has_warned = True
