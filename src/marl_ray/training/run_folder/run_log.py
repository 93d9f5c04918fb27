"""The lines of a run for people: on stderr, and all of them with their times in `NAME/run.log`."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Self

from marl_ray.config import RunConfig
from marl_ray.errors import describe_error
from marl_ray.stored_files.appended_file import AppendedFile, appended_file
from marl_ray.training.run_folder.record import filesystem_of
from marl_ray.training.tracking.printed_lines import print_line

LOG_FILE = "run.log"
"""Name of the file in a run's folder."""
HOLD_S = 3.0
"""Seconds after which a part of a run that may refuse it is shown."""


class RunLog:
    """Prints lines and writes them to the run's log; any thread may call it.

    Lines wait until the run's folder is made (`open`): a run that is refused leaves no folder.
    """

    def __init__(self, config: RunConfig):
        self.config, self.began = config, time.monotonic()
        self.file: AppendedFile | None = None
        self.waiting: list[str] = []
        self.lock = threading.RLock()  # a signal may be answered while a line is written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write how the block has ended, if not well, and leave the log complete in the run's folder."""
        if isinstance(error, Exception):
            self.write(f"failed: {describe_error(error)}")
        elif error is not None:
            self.write(f"ended by {type(error).__name__}")
        with self.lock, contextlib.suppress(OSError):
            if self.file is not None:
                self.file.close()
                self.file = None

    def open(self) -> None:
        """Write to the run's folder from now on, which exists; the lines that wait are written."""
        with contextlib.suppress(OSError):  # a log that cannot be written must not end a run
            filesystem, folder = filesystem_of(self.config)
            self.file = self.file or appended_file(filesystem, f"{folder}/{LOG_FILE}")
        self.write()

    def phase(self, text: str) -> None:
        """Show that a part of the run begins, with the seconds since the command began."""
        self._show(self._timestamp(text))

    @contextlib.contextmanager
    def held_phase(self, text: str) -> Iterator[None]:
        """Show a part of the run when it has taken HOLD_S seconds or has ended well.

        A mistake which is refused at once is thus one line.
        """
        line, shown = self._timestamp(text), threading.Lock()

        def show() -> None:
            if shown.acquire(blocking=False):
                self._show(line)

        timer = threading.Timer(HOLD_S, show)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        show()

    def say(self, text: str) -> None:
        """Print a line on stderr after the run's name, and write it to the log."""
        self._print(text)
        self.write(text)

    def write(self, *texts: str) -> None:
        """Write texts to the log alone; each line of them gets the time."""
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        with self.lock:
            self.waiting += [f"{now}  {line}" for text in texts for line in text.splitlines()]
            if self.file is not None:
                with contextlib.suppress(OSError):  # the lines wait for the next time
                    self.file.append(self.waiting)
                    self.waiting = []

    def _timestamp(self, text: str) -> str:
        return f"{time.monotonic() - self.began:.1f} s  {text}"

    def _show(self, line: str) -> None:
        if self.config.tracking.progress:
            self._print(line)
        self.write(line)

    def _print(self, text: str) -> None:
        print_line(f"{self.config.name}: {text}", sys.stderr)
