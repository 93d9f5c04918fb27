"""Workers and Ray Train's controller write a run's journal into its folder while it trains.

NAME/metrics.jsonl               rows of metrics, by the first of the workers (run_folder/metrics_file.py)
NAME/events.jsonl                that a part of the run begins, or a group of workers; by the first of the workers
NAME/failures.jsonl              why groups of workers ended; by the controller
NAME/transcripts/ITERATION.jsonl a few episodes as text, one a line; by the first of the workers

Each file has one writer. The driver reads them (follower.py, delivery.py); nothing waits for it.
"""

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile

from pyarrow import fs

from marl_ray.errors import describe_error
from marl_ray.stored_files.appended_file import AppendedFile, appended_file, lines_of
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, iteration_of, line_of, row_of

EVENTS_FILE, FAILURES_FILE, TRANSCRIPTS_FOLDER = "events.jsonl", "failures.jsonl", "transcripts"
PHASE_KEY = "phase"
"""Key of the event that a part of the run begins."""
LINE_KEY = "line"
"""Key of a line for people."""
STARTS_AFTER = "starts_after"
"""Key of the iteration of the checkpoint that a group of workers continues from; null where it begins anew."""
KEPT_ROWS = "kept_rows"
"""Key of the number of rows that there are when a group of workers starts."""
FAILED_BEFORE = "failed_before"
"""Key of the number of failures that there are when a group of workers starts."""
FAILURE_KEY, ERRORS_KEY = "failure", "errors"
"""Keys of failures: one line about the cause, and rank -> text of the error."""


class Journal:
    """The journal of one worker; any thread may call it.

    Workers of other ranks than 0 may make every call too, and write nothing.
    """

    def __init__(self, filesystem: fs.FileSystem, folder: str, rank: int = 0):
        """Continue the journal in the run's `folder`, which exists. Raises OSError."""
        self.filesystem, self.folder, self.is_writer = filesystem, folder, rank == 0
        self.lock = threading.Lock()
        self.waiting: list[str] = []
        """Lines of rows that a full disk did not take."""
        if self.is_writer:
            self.rows: AppendedFile = appended_file(filesystem, f"{folder}/{METRICS_FILE}")
            self.events: AppendedFile = appended_file(filesystem, f"{folder}/{EVENTS_FILE}")

    def begin(self, after: int | None) -> None:
        """Say that these workers continue from the checkpoint of iteration `after`, or begin anew where it is None.

        The rows after it are removed, because the workers play these iterations again. Raises OSError.
        """
        if not self.is_writer:
            return
        # A line that is no row goes when the driver starts again (repair.py); the rows behind it stay.
        rows = map(row_of, lines_of(self.filesystem, f"{self.folder}/{METRICS_FILE}"))
        count = sum(1 for _ in takewhile(lambda row: after is not None and iteration_of(row or {}) <= after, rows))
        self.rows.keep(count)
        failures = len(lines_of(self.filesystem, f"{self.folder}/{FAILURES_FILE}"))
        self._write_event({STARTS_AFTER: after, KEPT_ROWS: count, FAILED_BEFORE: failures})

    def write_row(self, metrics: Mapping[str, float]) -> None:
        """Write a row of metrics. One that a full disk refuses is written with the next."""
        if self.is_writer:
            with self.lock, contextlib.suppress(OSError):
                self.waiting.append(line_of(metrics))
                self._write_waiting()

    def phase(self, text: str) -> None:
        """Say that a part of the run begins."""
        self._try_event({PHASE_KEY: text})

    def say(self, line: str) -> None:
        """Let the driver print a line."""
        self._try_event({LINE_KEY: line})

    def write_transcripts(self, iteration: int, episodes: Sequence[Mapping[str, object]]) -> None:
        """Keep episodes as text. Call this before the iteration's row is written, because sinks look for them then."""
        if self.is_writer:
            with contextlib.suppress(OSError):
                self.filesystem.create_dir(f"{self.folder}/{TRANSCRIPTS_FOLDER}")
                with self.filesystem.open_output_stream(transcripts_path(self.folder, iteration)) as stream:
                    stream.write("".join(json.dumps(episode) + "\n" for episode in episodes).encode())

    def flush(self) -> None:
        """Make all rows durable. Raises OSError.

        Call this before a checkpoint is published: what a checkpoint covers is never played again.
        """
        if self.is_writer:
            with self.lock:
                self._write_waiting()
            self.rows.flush()

    def close(self) -> None:
        """Make all lines durable. Raises OSError."""
        if self.is_writer:
            with self.lock:
                self._write_waiting()
            self.rows.close()
            self.events.close()

    def _write_waiting(self) -> None:
        self.rows.append(self.waiting)
        self.waiting = []

    def _try_event(self, event: dict[str, object]) -> None:
        if self.is_writer:
            with contextlib.suppress(OSError):  # events are for people; nothing depends on them
                self._write_event(event)

    def _write_event(self, event: dict[str, object]) -> None:
        self.events.append([json.dumps({"timestamp": round(time.time(), 3)} | event)])


def transcripts_path(folder: str, iteration: int) -> str:
    """Return the path of the transcripts of an iteration in a run's folder."""
    return f"{folder}/{TRANSCRIPTS_FOLDER}/{iteration}.jsonl"


def write_failure(filesystem: fs.FileSystem, folder: str, errors: Mapping[int, BaseException]) -> None:
    """Write why a group of workers has ended, from what its ranks have raised, the most telling one first."""
    rank, error = next(iter(errors.items()))
    event = {
        FAILURE_KEY: f"worker {rank}: {describe_error(error)}",
        ERRORS_KEY: {str(rank): str(error) for rank, error in errors.items()},
    }
    with contextlib.suppress(OSError):  # the run continues without a word about it
        file = appended_file(filesystem, f"{folder}/{FAILURES_FILE}")
        file.append([json.dumps({"timestamp": round(time.time(), 3)} | event)])
        file.close()
