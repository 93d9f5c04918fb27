"""Exposure logging off the hot path.

Exposures wait in a bounded queue, which a thread writes to the store in batches, and in a spool on disk while the
database is away.

Exposures may wait, outcomes may not. An outcome is acknowledged once it is in the database, which needs the exposure of
its unit. So the handler of outcomes calls `flush` first, and refuses the outcome if that fails.

`kill -9` can lose the exposures of the last 0.1 s and those that are being written, while the database answers. When
the database goes away, it can lose those of the first second; after that, again those of the last 0.1 s, and at most
one batch (1,000) whose write hangs. All others are on disk, and the next process that uses the folder delivers them. A
session whose exposure was lost is exposed again by its next request: to the same arm, unless the weights have changed.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

import orjson
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.exc import DataError, IntegrityError

from marl_ray.errors import one_line
from marl_ray.experiments.database.connections import StoreError
from marl_ray.experiments.store.units import Exposure, UnitStore
from marl_ray.serving.logs.spool import Spool

FLUSH_INTERVAL_S = 0.1
"""Seconds between writes to the database, so that one transaction takes many exposures."""
CAPACITY = 100_000
"""Exposures that may wait in memory; beyond that they are dropped, counted, and logged by the next request."""
BATCH = 1_000
"""Exposures that one write takes."""
RETRY_S = 0.5
"""Pause after a failed write."""
PATIENCE_S = 1.0
"""Seconds that a write may hang before the queue goes to disk."""
ADOPTION_S = 10.0
"""Seconds between two checks for spools of dead replicas."""
WRITING_S = 12.0
"""Seconds that a flush waits for another flush; the database's own timeouts are shorter."""
CLOSE_S = 20.0
"""Seconds that closing waits for the thread's last batch."""

_EXPOSURE = TypeAdapter(Exposure)
_log = logging.getLogger(__name__)


class ExposureLog:
    """Exposures that wait for the store.

    `put` never blocks and never touches the disk; after `flush` the store has everything put before.

    With a spool, exposures that the database does not accept go to disk, and are delivered in order when it answers
    again; without one they wait in memory. If the spool is full or its disk fails, exposures wait in memory again, and
    are dropped when that is full too.
    """

    def __init__(
        self,
        store: UnitStore,
        spool: Spool | None = None,
        capacity: int = CAPACITY,
        interval_s: float = FLUSH_INTERVAL_S,
    ):
        """Own the spool from now on, which the log closes; keep at most `capacity` exposures in memory."""
        self._store = store
        self.dropped = 0
        """Exposures that `put` refused."""
        self.rejected = 0
        """Exposures that are lost: unreadable lines of the spool, and rows that the database can never accept."""
        self.spool = spool
        self.capacity = capacity
        self.interval_s = interval_s
        self._queue: deque[Exposure] = deque()
        self._writing = threading.Lock()
        self._moving = threading.Lock()
        """Guards the spool, and moves of exposures from the queue to it."""
        self._caught_up_at = math.inf
        """Moment at which only the queue was left to write, in monotonic seconds; -inf while writes fail."""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; a second call does nothing."""
        if self._threads:
            return
        loops = [self._run_writer] if self.spool is None else [self._run_writer, self._run_spiller]
        self._threads = [threading.Thread(target=loop, name="exposure-log", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of exposures in memory."""
        return len(self._queue)

    def put(self, exposure: Exposure) -> bool:
        """Queue an exposure; False if the queue is full."""
        if len(self._queue) >= self.capacity:
            self.dropped += 1
            return False
        self._queue.append(exposure)
        return True

    def flush(self) -> None:
        """Store everything put so far, and what this process has on disk.

        If the database fails, raises StoreError and keeps what is not written.
        """
        # The thread that holds the lock also holds the batch that has left the queue, so flushing must wait for it.
        if not self._writing.acquire(timeout=WRITING_S):
            raise StoreError(f"experiment store: a write of exposures has taken longer than {WRITING_S:g} s")
        try:
            self._write()
        except Exception as error:
            self._caught_up_at = -math.inf
            if isinstance(error, OSError):
                raise StoreError(f"spool: {one_line(error)}") from error
            raise
        finally:
            self._writing.release()

    def _write(self) -> None:
        while True:
            while self._deliver(adopted=False):
                pass
            self._caught_up_at = time.monotonic()
            remaining = len(self._queue)  # exposures put from now on belong to the next flush
            while remaining > 0:
                with self._moving:
                    batch = [self._queue.popleft() for _ in range(min(BATCH, remaining, len(self._queue)))]
                if not batch:
                    break
                remaining -= len(batch)
                try:
                    self._record(batch)
                except Exception:
                    with self._moving:
                        self._queue.extendleft(reversed(batch))
                    raise
            with self._moving:  # if the write hung before it succeeded, other exposures may have gone to disk meanwhile
                if self.spool is None or self.spool.peek() is None:
                    return

    def _deliver(self, adopted: bool) -> bool:
        """Store the oldest lines on disk; False if there are none."""
        if self.spool is None:
            return False
        with self._moving:
            chunk = self.spool.peek(adopted)
        if chunk is None:
            return False
        exposures = [exposure for line in chunk.lines if (exposure := read_exposure(line)) is not None]
        self._record(exposures)
        unreadable = len(chunk.lines) - len(exposures)
        if unreadable:
            self.rejected += unreadable
            _log.error("%s: %d unreadable lines, each an exposure lost", chunk.segment.path, unreadable)
        with self._moving:
            self.spool.mark_delivered(chunk)
        return True

    def _record(self, batch: Sequence[Exposure]) -> None:
        """Store a batch without the rows that the database can never accept, which would block all others forever."""
        try:
            self._store.record_exposures(batch)
        except StoreError as error:
            if not isinstance(error.__cause__, DataError | IntegrityError):
                raise
            if len(batch) > 1:
                self._record(batch[: len(batch) // 2])
                self._record(batch[len(batch) // 2 :])
                return
            self.rejected += 1
            _log.error("an exposure in %s is lost: %s", batch[0].experiment, error)

    def spill(self) -> None:
        """Move the queue to disk. Raises OSError, and keeps the rest queued, if the disk is full or fails."""
        assert self.spool is not None
        remaining = len(self._queue)
        while remaining > 0:
            with self._moving:
                batch = [self._queue.popleft() for _ in range(min(BATCH, remaining, len(self._queue)))]
                spooled = 0
                try:
                    spooled = self.spool.append([orjson.dumps(exposure) for exposure in batch])
                finally:
                    self._queue.extendleft(reversed(batch[spooled:]))
            if spooled < len(batch):
                raise OSError("the spool is full")
            remaining = remaining - spooled if batch else 0

    def close(self) -> None:
        """Write the queue to the database, or else to disk, and stop the threads."""
        self._closing.set()
        if self.spool is not None and self._is_late():
            self._try_to_spill(quiet=False)  # before waiting for what hangs, which a deadline of others may end early
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._threads = []
        try:
            self.flush()
        except StoreError as error:
            if self.spool is not None:
                self._try_to_spill(quiet=False)
            if self._queue:
                _log.error("%d exposures are lost: %s", len(self._queue), error)
        if self.spool is not None:
            with self._moving:
                self.spool.close()

    def _run_writer(self) -> None:
        failing = False
        pause = 0.0
        adopted_at = -math.inf
        while not self._closing.wait(pause):
            try:
                self.flush()
                if self.spool is not None and time.monotonic() - adopted_at > ADOPTION_S:
                    adopted_at = time.monotonic()
                    with self._moving:
                        self.spool.adopt()
                pause = 0.0 if self._deliver(adopted=True) else self.interval_s
                failing = False
            except Exception as error:  # this thread must survive any error
                if not failing:  # one line per outage, not two per second
                    _log.error("exposures wait %s: %s", "in memory" if self.spool is None else "on disk", error)
                failing = True
                pause = RETRY_S

    def _run_spiller(self) -> None:
        failing = False
        while not self._closing.wait(FLUSH_INTERVAL_S):
            if self._is_late():
                failing = not self._try_to_spill(quiet=failing)

    def _is_late(self) -> bool:
        """Return True if the queue must go to disk, because the database fails or hangs."""
        return time.monotonic() - self._caught_up_at >= PATIENCE_S

    def _try_to_spill(self, quiet: bool) -> bool:
        try:
            self.spill()
        except OSError as error:
            if not quiet:
                _log.error("exposures wait in memory: %s", one_line(error))
            return False
        return True


def read_exposure(line: bytes) -> Exposure | None:
    """Return the exposure of a line of the spool; None if the line is not one."""
    try:
        return _EXPOSURE.validate_json(line)
    except ValidationError:
        return None
