"""Show what workers write to the journal while they train.

A progress bar, lines for people and the run's log show it.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from pyarrow import fs

from marl_ray.config import RunConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.stored_files.tail import Tail
from marl_ray.training.journal.writer import (
    ERRORS_KEY,
    EVENTS_FILE,
    FAILED_BEFORE,
    FAILURE_KEY,
    FAILURES_FILE,
    KEPT_ROWS,
    LINE_KEY,
    PHASE_KEY,
    STARTS_AFTER,
)
from marl_ray.training.run_folder.metrics_file import METRICS_FILE
from marl_ray.training.tracking.printed_lines import print_line
from marl_ray.training.tracking.progress_bar import ProgressBar

CLOSE_S = 10.0
"""Maximum seconds that the end of a run waits for its last rows to be shown."""


class Console(Protocol):
    """Takes what is shown to people."""

    def phase(self, text: str) -> None:
        """Show that a part of the run begins."""

    def say(self, text: str) -> None:
        """Print a line, and keep it."""

    def write(self, *texts: str) -> None:
        """Keep texts without printing them."""


class Follower:
    """Reads the journal on its own thread until it is closed; what was written before is not shown."""

    def __init__(
        self,
        config: RunConfig,
        filesystem: fs.FileSystem,
        folder: str,
        console: Console,
        watch: Callable[[], None] = lambda: None,
    ):
        """Follow the run's journal in `folder`; `watch` is called each time that the files are read."""
        self.config = config
        self.filesystem = filesystem
        self.folder = folder
        self.console = console
        self.watch = watch
        self.tails = {name: Tail(filesystem, f"{folder}/{name}") for name in (EVENTS_FILE, FAILURES_FILE, METRICS_FILE)}
        self.counts = {name: tail.count() for name, tail in self.tails.items()}
        """File -> number of its lines that were shown."""
        self.failures: list[tuple[int, str]] = []
        """(number of the failure, its cause) for each group of workers that has ended, until the next group begins."""
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="journal", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Show the rest, and stop; a second call does nothing."""
        self.done.set()
        self.thread.join(CLOSE_S)

    def _follow(self) -> None:
        with contextlib.ExitStack() as tails, ProgressBar(self.config, self.console.write) as progress:
            for tail in self.tails.values():
                tails.callback(tail.close)
            while True:
                # The wait comes before the reading, so that no line written before `close` is missed.
                ends = self.done.wait(self.tails[METRICS_FILE].poll_s)
                with contextlib.suppress(OSError):  # storage that does not answer is asked again for what was not shown
                    self._show_new_lines(progress)
                self.watch()
                if ends:
                    return

    def _show_new_lines(self, progress: ProgressBar) -> None:
        """Show what was written since it was last shown. Raises OSError; a line counts once it was shown."""
        events = self._read(EVENTS_FILE)
        # Failures are read after the events and noted before them: a group's failure is written before the event that the
        # next group begins.
        for number, failure in self._read(FAILURES_FILE):
            self._note_failure(number, failure)
            self.counts[FAILURES_FILE] = number
        for number, event in events:
            self._show_event(event)
            self.counts[EVENTS_FILE] = number
        if rows := self._read(METRICS_FILE):
            self._show_rows([row for _, row in rows], progress)
            self.counts[METRICS_FILE] = rows[-1][0]

    def _read(self, name: str) -> list[tuple[int, JsonObject]]:
        """Return the entries that were not shown yet, each with the number of its line. Raises OSError."""
        entries: list[tuple[int, JsonObject]] = []
        count = self.counts[name]
        while lines := self.tails[name].read(count):
            for line in lines:
                count += 1
                with contextlib.suppress(ValueError):  # a line that is no JSON is not shown
                    entry = json.loads(line)
                    entries += [(count, entry)] if isinstance(entry, dict) else []
        return entries

    def _note_failure(self, number: int, failure: JsonMapping) -> None:
        """Keep the cause of a failure, and write the tracebacks of its workers to the log. Raises OSError."""
        texts = list[str]()
        for rank, error in failure[ERRORS_KEY].items():
            path = f"{self.folder}/errors/worker-{rank}.txt"
            if self.filesystem.get_file_info(path).type != fs.FileType.File:
                continue
            with self.filesystem.open_input_stream(path) as stream:
                text = bytes(stream.read()).decode(errors="replace")
            if error in text:  # and not the traceback of an earlier failure
                texts.append(f"worker {rank}: {text}")
        self.console.write(*texts)
        self.failures.append((number, failure[FAILURE_KEY]))

    def _show_event(self, event: JsonMapping) -> None:
        if PHASE_KEY in event:
            self.console.phase(event[PHASE_KEY])
        elif LINE_KEY in event:
            self.console.say(event[LINE_KEY])
        elif STARTS_AFTER in event:
            self.counts[METRICS_FILE] = event[KEPT_ROWS]
            # One look may have read that a group begins and, behind it, why the same group ended.
            before = [cause for number, cause in self.failures if number <= event[FAILED_BEFORE]]
            if before:
                last = event[STARTS_AFTER]
                begin = "the beginning" if last is None else f"the checkpoint of iteration {last:,}"
                self.console.say(f"its workers start again from {begin}: {before[-1]}")
                self.failures = self.failures[len(before) :]

    def _show_rows(self, rows: list[JsonObject], progress: ProgressBar) -> None:
        for row in [row for row in rows if "iteration" not in row][-1:]:
            line = _warm_start_line(row)
            self.console.write(line)
            if self.config.tracking.progress:
                print_line(f"{self.config.name}: {line}", sys.stdout)
        if rows and "iteration" in rows[-1]:
            progress.show(rows[-1])


def _warm_start_line(row: Mapping[str, float]) -> str:
    """Return one epoch of a warm start as a line."""
    shown = {key: value for key, value in row.items() if key not in ("steps", "timestamp")}
    parts = (f"{key} {value:.4g}" for key, value in shown.items() if not key.startswith("system/"))
    return "  ".join(parts)
