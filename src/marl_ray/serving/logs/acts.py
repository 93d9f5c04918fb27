"""The log of every act and every text, in segments of JSON lines, which runs can train on after an export.

    FOLDER/EXPERIMENT/decisions-PID-RANDOM.jsonl.partial     being written
    FOLDER/EXPERIMENT/decisions-PID-RANDOM.jsonl.zst         complete

A segment is complete, and then never changes, once it has its final name. Where FOLDER is a URI (`s3://bucket/prefix`),
segments are written to a local staging folder and uploaded when they are complete.

`kill -9` loses the requests of the last quarter of a second; what was written lies in a partial segment, which is read
like the others, and which the next log of the same FOLDER completes. The log is for learning, not for
the experiment's statistics: where the disk or the bucket fails for long, requests are dropped and counted.
"""

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from pyarrow import fs

from marl_ray.config.base import NAME_PATTERN
from marl_ray.errors import MarlRayError, one_line
from marl_ray.serving.logs.spool import Segment
from marl_ray.stored_files.durability import create_local_folder, sync_to_disk
from marl_ray.stored_files.storages import open_storage
from marl_ray.temporary_folders import new_temporary_folder

PREFIX, PARTIAL_SUFFIX, COMPLETE_SUFFIX = "decisions-", ".jsonl.partial", ".jsonl.zst"
CAPACITY = 10_000
"""Logged requests that may wait in memory; beyond that they are dropped and counted."""
WRITE_INTERVAL_S = 0.25
"""Seconds between writes of what waits in memory."""
SEGMENT_BYTES = 16_000_000
"""Size of a segment as JSON; a complete (compressed) segment takes a fraction of it."""
SEGMENT_S = 60.0
"""Seconds after which a segment is completed even if it is small."""
LIMIT_BYTES = 2_000_000_000
"""Bound of the segments that wait to be completed; beyond it requests are dropped and counted."""
RETRY_S = 5.0
"""Seconds of pause after a segment that could not be completed."""
CLOSE_S = 20.0
"""Seconds that closing waits for the last segments to be completed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnitRecord:
    """The fields of every record, which is of one unit."""

    experiment: str
    unit: str
    arm: str
    digest: str
    """Digest of the arm's bundle."""
    epoch: int
    """Epoch of the weights by which the arm was assigned."""
    propensity: float
    """Probability with which the unit got its arm."""
    at: float
    """Moment of the answer, in seconds since 1970."""
    greedy: bool
    """True if nothing was drawn at random."""


@dataclass(frozen=True, slots=True)
class LoggedAct(_UnitRecord):
    """One act of all agents whose observations were given."""

    observations: dict[str, Any]
    """Agent -> observation as plain (nested) lists."""
    actions: dict[str, Any]
    """Agent -> action, a number or list."""
    log_probs: dict[str, float]
    """Agent -> log-probability of the action under the policy that took it."""
    masks: dict[str, list[Any]] = field(default_factory=dict)
    """Agent -> its allowed actions (0 or 1 per action), for agents that gave a mask."""


@dataclass(frozen=True, slots=True)
class LoggedText(_UnitRecord):
    """One response of one agent; `at` is when it ended."""

    agent: str
    prompt: str | None
    """None if the request has messages."""
    messages: Sequence[object]
    """The chat's messages, `{"role": ..., "content": ...}` each; empty if the request has a prompt."""
    tools: Sequence[object]
    """The tools that the chat offered."""
    prompt_ids: Sequence[int]
    """Tokens that the model read before its first own one; empty if the arm reports none."""
    text: str
    """The text that the client got."""
    ids: Sequence[int]
    """Sampled tokens."""
    log_probs: Sequence[float]
    """The log-probability of each token at the temperature in force, before `top_k` and `top_p`; for a greedy text at
    the bundle's own temperature."""
    finish: str
    """`stop`, `length`, or `broken_off` because the client left or the arm failed; then the record has what was
    sent."""
    seed: int
    settings: dict[str, object]
    """The settings in force: `temperature`, `top_p`, `top_k`, `max_tokens`; empty if the arm reports none."""
    asked: Sequence[str]
    """Names of the settings that the request itself chose."""


LoggedRequest = LoggedAct | LoggedText


@dataclass(frozen=True)
class _OpenSegment:
    """A segment that is being written."""

    segment: Segment
    since: float
    """Moment at which it began, in monotonic seconds."""


class ActLog:
    """Queues logged requests for their folder. `put` never blocks, and leaves all work to threads."""

    def __init__(
        self,
        folder: str,
        staging: str | None = None,
        capacity: int = CAPACITY,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float = SEGMENT_S,
        limit_bytes: int = LIMIT_BYTES,
    ):
        """Open the log in a local folder or at a URI.

        For a URI, `staging` is a local folder of this machine, from which the next log of the same URI uploads what a
        killed process left; without it, that is lost. Raises MarlRayError if a local folder cannot be written to.
        """
        filesystem, self._root = open_storage(folder, "decision_log")
        self._remote = filesystem if "://" in folder else None
        if self._remote is not None:
            # A subfolder for each URI, so that segments left for one are never uploaded to another.
            subfolder = blake2b(folder.encode(), digest_size=8).hexdigest()
            self._local = (Path(staging) if staging else new_temporary_folder("decisions")) / subfolder
        else:
            self._local = Path(self._root)
        try:
            create_local_folder(self._local)
            Segment.create(self._local, PREFIX, PARTIAL_SUFFIX).remove()
        except OSError as error:
            raise MarlRayError(f"decision_log: {str(self._local)!r} cannot be written to: {one_line(error)}") from error
        self._segment_bytes = segment_bytes
        self._segment_s = segment_s
        self._limit = limit_bytes
        self._queue: deque[LoggedRequest] = deque()
        self._capacity = capacity
        self._refused = self._lost = 0
        self._open: dict[str, _OpenSegment] = {}
        self._sealed: deque[Segment] = deque()
        self._closing = threading.Event()
        self._written = threading.Event()
        self._wake = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def waiting(self) -> int:
        """The number of logged requests in memory."""
        return len(self._queue)

    @property
    def dropped(self) -> int:
        """The number of requests that were dropped, because the queue was full or the disk failed."""
        return self._refused + self._lost

    def start(self) -> None:
        """Start the threads; a second call does nothing."""
        if not self._threads:
            loops = (self._run_writer, self._run_completer)
            self._threads = [threading.Thread(target=loop, name="act-log", daemon=True) for loop in loops]
            for thread in self._threads:
                thread.start()

    def put(self, record: LoggedRequest) -> bool:
        """Queue a request, which the caller must not change any more; False if the queue is full."""
        if len(self._queue) >= self._capacity:
            self._refused += 1
            return False
        self._queue.append(record)
        return True

    def close(self) -> None:
        """Write and complete the queue. A segment that cannot be uploaded in time stays in the staging folder."""
        if not self._threads:
            self.start()
        self._closing.set()
        for thread in self._threads:
            thread.join(CLOSE_S)
        if self._sealed:
            _log.error("%d segments of logged requests are left in %s", len(self._sealed), self._local)

    def _run_writer(self) -> None:
        failing = False
        last = False
        while not last:
            last = self._closing.wait(WRITE_INTERVAL_S)
            for experiment, lines in self._encode_queue().items():
                try:
                    self._write(experiment, b"".join(lines))
                    failing = False
                except OSError as error:
                    self._lost += len(lines)
                    if not failing:
                        _log.error("logged requests are dropped: %s", one_line(error))
                    failing = True
            for experiment, writing in list(self._open.items()):
                full = writing.segment.size >= self._segment_bytes
                if last or full or time.monotonic() - writing.since >= self._segment_s:
                    self._sealed.append(self._open.pop(experiment).segment)
                    self._wake.set()
        self._written.set()
        self._wake.set()

    def _encode_queue(self) -> dict[str, list[bytes]]:
        """Take the queue, as lines by experiment."""
        lines: dict[str, list[bytes]] = {}
        for _ in range(len(self._queue)):
            record = self._queue.popleft()
            try:
                line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
            except TypeError as error:
                self._lost += 1
                _log.error("a logged request of %s is dropped: %s", record.experiment, one_line(error))
            else:
                lines.setdefault(record.experiment, []).append(line)
        return lines

    def _write(self, experiment: str, data: bytes) -> None:
        waiting = [*(writing.segment for writing in self._open.values()), *list(self._sealed)]
        if sum(segment.size for segment in waiting) + len(data) > self._limit:
            raise OSError(f"{self._limit} bytes wait in {self._local}")
        if experiment not in self._open:
            if not re.fullmatch(NAME_PATTERN, experiment):  # the name becomes that of a folder
                raise OSError(f"experiment {experiment!r} has no usable name")
            folder = self._local / experiment
            create_local_folder(folder)
            self._open[experiment] = _OpenSegment(Segment.create(folder, PREFIX, PARTIAL_SUFFIX), time.monotonic())
        self._open[experiment].segment.append(data)

    def _run_completer(self) -> None:
        failing = False
        last = False
        try:
            segments = (Segment.adopt(path) for path in self._local.glob(f"*/{PREFIX}*{PARTIAL_SUFFIX}"))
            self._sealed.extend(segment for segment in segments if segment is not None)
        except OSError as error:
            _log.error("logged requests of dead processes stay in %s: %s", self._local, one_line(error))
        while not last:
            last = self._written.is_set()
            try:
                while self._sealed:
                    self._complete(self._sealed[0])
                    self._sealed.popleft()
                failing = False
            except (OSError, pa.ArrowException) as error:
                if not failing:
                    _log.error("segments of logged requests wait in %s: %s", self._local, one_line(error))
                failing = True
            if not last:
                self._wake.wait(RETRY_S)
                self._wake.clear()

    def _complete(self, segment: Segment) -> None:
        """Give a segment its final name, compressed and in its place, and remove the partial one."""
        data = whole_lines(os.pread(segment.fd, segment.size, 0))
        if data:
            experiment = segment.path.parent.name
            name = segment.path.name.removesuffix(PARTIAL_SUFFIX) + COMPLETE_SUFFIX
            temporary = segment.path.with_name(f"{name}.tmp")
            with temporary.open("wb") as file:
                file.write(pa.Codec("zstd").compress(data, asbytes=True))
                file.flush()
                os.fsync(file.fileno())
            if self._remote is None:
                os.replace(temporary, segment.path.with_name(name))
                sync_to_disk(segment.path.parent)  # before the partial segment is gone
            else:
                upload(temporary, self._remote, f"{self._root}/{experiment}/{name}")
                temporary.unlink()
        segment.remove()


def upload(source: Path, filesystem: fs.FileSystem, path: str) -> None:
    """Copy a local file to `path` of the filesystem, with the folders that it needs there.

    Raises OSError if that fails.
    """
    if filesystem.type_name != "s3":  # S3 has no folders
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
    fs.copy_files(str(source), path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=filesystem)


def whole_lines(data: bytes) -> bytes:
    """Return the data up to the end of its last complete line."""
    return data[: data.rfind(b"\n") + 1]
