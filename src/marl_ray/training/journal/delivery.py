"""Deliver the rows of a run's journal to one sink.

Rows come in order, each once, however often the sink or the driver fails. The sink's mark in the run's folder,
`NAME/sinks/SINK.json`, notes what the sink has taken. The journal itself is the outbox, so rows that wait take no
memory, and wait as long as they must.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from pyarrow import fs

from marl_ray.errors import one_line
from marl_ray.stored_files.appended_file import take_over_copy
from marl_ray.stored_files.json_files import read_json, write_json
from marl_ray.stored_files.tail import Tail
from marl_ray.training.run_folder.metrics_file import METRICS_FILE, iteration_of, row_of
from marl_ray.training.tracking.sinks import IdentifiedSink, ResumableSink, Sink

MARKS_FOLDER = "sinks"
"""Folder of the marks in a run's folder."""
LOG_EVERY_S = 1.0
"""Minimum seconds between two calls of a sink that keeps up."""
RETRY_S = 3.0
"""Seconds after which a sink that failed is called again."""
SILENT_S = 60.0
"""Seconds after which a call that has not returned is reported."""
LAST_TRIES = 3
"""Calls that a sink may fail one after the other once the run has ended."""
MAX_ROWS = 1000
"""Maximum number of rows of one call."""


@dataclass
class Mark:
    """The rows that a sink has taken."""

    rows: int = 0
    """The first rows of `metrics.jsonl`, this many. A row that a restart removes is written again in the same place, with
    the same metrics, and is not given again."""
    run_id: str = ""
    """The `run_id` of an `IdentifiedSink`; empty for other sinks."""
    ended: str = ""
    """The status with which the sink was closed after it had got all there was; empty while a run continues."""
    iteration: int | None = None
    """The iteration of the last row that it has taken; -1 for an epoch of a warm start, None before the first row."""


def read_mark(filesystem: fs.FileSystem, folder: str, name: str) -> Mark:
    """Return the mark of a sink in a run's folder.

    The mark is that of a new sink where there is none. Raises OSError.
    """
    try:
        return mark_of(read_json(filesystem, _mark_path(folder, name)))
    except ValueError:  # a file of something else: the sink gets all rows
        return Mark()


def mark_of(stored: Any) -> Mark:
    """Return the mark that a file of plain data holds.

    For no file, or anything that is no mark, it is that of a new sink.
    """
    try:
        mark = Mark(**(stored or {}))
    except TypeError:
        return Mark()
    counts = (mark.rows, 0 if mark.iteration is None else mark.iteration)
    is_valid = (
        all(type(count) is int for count in counts) and isinstance(mark.run_id, str) and isinstance(mark.ended, str)
    )
    return mark if is_valid and mark.rows >= 0 else Mark()


def _mark_path(folder: str, name: str) -> str:
    return f"{folder}/{MARKS_FOLDER}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"


class Delivery:
    """One sink, on its own thread: it opens the sink, gives it rows, and closes it."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        filesystem: fs.FileSystem,
        folder: str,
        say: Callable[[str], None],
        opened: Sink | None = None,
        file: str = METRICS_FILE,
        owns: Callable[[], bool] = lambda: True,
        is_new_run: bool = False,
    ):
        """Deliver the rows of a `file` in `folder` to a sink, which `make` opens if it is not `opened` already.

        `say` prints a line. The sink is called while `owns` says that the folder has no other owner, who would call
        it too. In a new run a sink that cannot be opened is given up, and `failure` says why. Raises OSError
        if the mark or the rows cannot be read.
        """
        self.name = name
        self.make = make
        self.say = say
        self.sink = opened
        self.owns = owns
        self.filesystem, self.folder = filesystem, folder
        take_over_copy(filesystem, f"{folder}/{file}")
        self.tail = Tail(filesystem, f"{folder}/{file}")
        mark = read_mark(filesystem, folder, name)
        self.mark = replace(mark, ended="")
        self.is_in_step = False
        """True while mark and `last` say exactly what the sink has."""
        self.last: int | None = None
        """The last iteration that the sink said it has. Workers may be about to play it again."""
        self.failure = ""
        """The last error of the sink, or that it does not answer, in one line; empty while it takes rows."""
        self.failures = 0
        """Number of calls that have failed one after the other."""
        self.call_began_at: float | None = None
        """Time at which the call of the sink began that is still running, by the monotonic clock; None between calls."""
        self.status = ""
        """Status with which the sink is closed; empty until the journal is complete."""
        self.on_finish: Callable[[Any], None] = lambda sink: None
        """Called with the sink before it is closed."""
        self.is_new_run = is_new_run
        self.opened_or_failed = threading.Event()
        """Set when the sink is open, or was given up."""
        self.journal_complete = threading.Event()
        """Set when the journal gets no more rows."""
        self.stopped = threading.Event()
        """Set when the sink is not to be called any more."""
        self.thread = threading.Thread(target=self._deliver, name=f"sink {name}", daemon=True)
        self.thread.start()

    def end(self, status: str, on_finish: Callable[[Any], None]) -> None:
        """Let the sink be closed when it has got all rows, because the journal is complete.

        `on_finish` is called with the sink first.
        """
        self.status, self.on_finish, self.failures = status, on_finish, 0
        self.journal_complete.set()

    def watch(self) -> None:
        """Print a line if the sink does not return."""
        began_at = self.call_began_at
        if began_at is not None and time.monotonic() - began_at > SILENT_S and not self.failure:
            self.failure = f"it has not answered for {SILENT_S:g} s"
            self.say(f"{self.name}: {self.failure}; its rows wait in the run's folder")

    def leave(self) -> None:
        """Make no more calls of the sink, and print what it has not got.

        Another owner of the run prints that itself.
        """
        self.stopped.set()
        if self.mark.ended or not self.owns():
            return
        waiting = 0
        with contextlib.suppress(OSError), contextlib.closing(Tail(self.filesystem, self.tail.path)) as tail:
            waiting = max(0, tail.count() - self.mark.rows)
        summary = f"{waiting:,} rows are not in {self.name} yet" if waiting else f"{self.name} is not complete yet"
        self.say(f"{summary} ({self.failure or 'it is too slow'}); the same command delivers them")

    def _deliver(self) -> None:
        """Call the sink until it is closed, given up or another owner's."""
        with contextlib.closing(self.tail):
            while not self.stopped.is_set():
                self.call_began_at = time.monotonic()
                try:
                    if self._call_once():
                        break
                except Exception as error:  # each library has its own error types, and none may end a run
                    if self.is_new_run and self.sink is None:
                        self.failure = one_line(error)
                        break
                    self._note_failure(one_line(error))
        self.opened_or_failed.set()

    def _call_once(self) -> bool:
        """Make one call of the sink, or wait for rows, and return True when the sink is closed or is another owner's."""
        if not self.owns():
            return True
        if self.sink is None:
            self.sink = self.make()
        self.opened_or_failed.set()
        if not self.is_in_step:
            run_id = self.sink.run_id if isinstance(self.sink, IdentifiedSink) else ""
            if run_id != self.mark.run_id:
                self.mark = Mark(run_id=run_id) if self.mark.run_id else replace(self.mark, run_id=run_id)
                self._store_mark()
            # A process may have been killed, or a request have run out of time, after the sink took rows and before that
            # was noted.
            self.last = self.sink.last_iteration() if isinstance(self.sink, ResumableSink) else None
            self.is_in_step = True
        is_complete = self.journal_complete.is_set()  # before reading, so that the last rows are not missed
        lines = self.tail.read(self.mark.rows, MAX_ROWS)
        rows = [row_of(line) for line in lines]
        taken_rows = list(takewhile(lambda row: self.last is not None and iteration_of(row or {}) <= self.last, rows))
        if taken_rows:
            self._note_taken(taken_rows)
        elif rows:
            self.is_in_step = False
            self.sink.log([row for row in rows if row is not None])
            self.is_in_step = True
            self._note_taken(rows)
        elif is_complete:
            self.on_finish(self.sink)
            self.sink.end(self.status)
            self.mark.ended = self.status
            self._store_mark()
            return True
        self.call_began_at = None
        if self.failure:
            self.say(f"{self.name} takes rows again")
            self.failure = ""
        self.failures = 0
        if not taken_rows and len(lines) < MAX_ROWS:
            self.journal_complete.wait(max(LOG_EVERY_S, self.tail.poll_s))
        return False

    def _note_taken(self, rows: Sequence[Mapping[str, float] | None]) -> None:
        self.mark.rows += len(rows)
        self.mark.iteration = iteration_of(rows[-1] or {})
        self._store_mark()

    def _store_mark(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the next note says all
            path = _mark_path(self.folder, self.name)
            self.filesystem.create_dir(f"{self.folder}/{MARKS_FOLDER}")
            write_json(self.filesystem, path, asdict(self.mark))

    def _note_failure(self, failure: str) -> None:
        self.call_began_at = None
        is_complete = self.journal_complete.is_set()
        if not self.failure and not is_complete:
            self.say(f"{self.name}: {failure}; its rows wait in the run's folder")
        self.failure, self.failures = failure, self.failures + 1
        if is_complete and self.failures >= LAST_TRIES:
            self.stopped.set()
        (self.stopped if is_complete else self.journal_complete).wait(RETRY_S)
