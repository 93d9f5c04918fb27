"""Exposure logging off the hot path: a bounded queue that a thread writes to the store in batches, and a spool on disk for
the time that the database is away.

Exposures may wait, outcomes may not. An outcome is acknowledged once it is in the database, which needs the exposure of
its unit. So the handler of outcomes calls `flush` first, and refuses the outcome if that fails.

What `kill -9` can lose: while the database answers, the exposures of the last 50 ms and those that are just being
written. When the database goes away, those of the first second; after that, again those of the last 50 ms, and at most
one batch (1,000) in the hands of a write that hangs. All others are on disk, and the next process that uses the folder
delivers them. A session whose exposure was lost is exposed again by its next request: to the same arm, unless the weights
have changed.
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
from marl_ray.experiments.store.experiment_store import ExperimentStore, Exposure, StoreError
from marl_ray.serving.logs.spool import Spool

FLUSH_INTERVAL_S = 0.1
CAPACITY = 100_000
"""Exposures that may wait in memory; beyond that they are dropped, counted, and logged by the next request."""
BATCH = 1_000
RETRY_S = 0.5
"""Pause after a failed write."""
PATIENCE_S = 1.0
"""Seconds that a write may hang before what waits goes to disk."""
ADOPTION_S = 10.0
"""Seconds between looks for what dead replicas left behind."""
WRITING_S = 12.0
"""Seconds that a flush waits for another one; the database's own timeouts are shorter."""
CLOSE_S = 20.0
"""Seconds that closing waits for the thread's last batch."""

_EXPOSURE = TypeAdapter(Exposure)
_log = logging.getLogger(__name__)


class ExposureLog:
    """Exposures on their way to the store. `put` never blocks and never touches the disk; after `flush` everything put
    before is stored.

    With a spool, what the database does not take goes to disk, and is delivered, in order, when it answers again; without
    one it waits in memory. Where the spool is full or its disk fails, exposures wait in memory again, and are dropped when
    that is full too.
    """

    def __init__(
        self,
        store: ExperimentStore,
        spool: Spool | None = None,
        capacity: int = CAPACITY,
        interval_s: float = FLUSH_INTERVAL_S,
    ):
        """The spool is this log's own from now on, which closes it."""
        self.store = store
        self.dropped = 0
        """Exposures that `put` refused."""
        self.rejected = 0
        """Exposures that are gone: unreadable lines of the spool, and what the database will never take."""
        self._spool = spool
        self._capacity = capacity
        self._interval_s = interval_s
        self._queue: deque[Exposure] = deque()
        self._writing = threading.Lock()
        # Held while exposures move from the queue to the spool, and for whatever is done with the spool.
        self._moving = threading.Lock()
        # When nothing but the queue was left to write, by the monotonic clock; -inf while writes fail.
        self._kept_up = math.inf
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; twice is once."""
        if self._threads:
            return
        loops = [self._write_on] if self._spool is None else [self._write_on, self._spill_on]
        self._threads = [threading.Thread(target=loop, name="exposure-log", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of exposures in memory."""
        return len(self._queue)

    @property
    def spooled(self) -> int:
        """Bytes of this process's exposures on disk; never blocks."""
        return 0 if self._spool is None else self._spool.size

    def put(self, exposure: Exposure) -> bool:
        """Queue an exposure; False if the queue is full."""
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return False
        self._queue.append(exposure)
        return True

    def flush(self) -> None:
        """Store everything put so far, and what this process has on disk. Raises StoreError, and keeps what is not written,
        if the database fails."""
        # Whoever holds the lock has the batch that is not in the queue any more, so waiting for it is part of flushing.
        if not self._writing.acquire(timeout=WRITING_S):
            raise StoreError(f"experiment store: a write of exposures has taken longer than {WRITING_S:g} s")
        try:
            self._write()
        except Exception as error:
            self._kept_up = -math.inf
            if isinstance(error, OSError):
                raise StoreError(f"spool: {one_line(error)}") from error
            raise
        finally:
            self._writing.release()

    def _write(self) -> None:
        while True:
            while self._deliver(adopted=False):
                pass
            self._kept_up = time.monotonic()
            left = len(self._queue)  # what comes from now on is the next flush's
            while left > 0:
                with self._moving:
                    batch = [self._queue.popleft() for _ in range(min(BATCH, left, len(self._queue)))]
                if not batch:
                    break
                left -= len(batch)
                try:
                    self._record(batch)
                except Exception:
                    with self._moving:
                        self._queue.extendleft(reversed(batch))
                    raise
            with self._moving:  # a write that hung and then went through: others may have gone to disk meanwhile
                if self._spool is None or self._spool.peek() is None:
                    return

    def _deliver(self, adopted: bool) -> bool:
        """Store the oldest lines on disk; False if there are none."""
        if self._spool is None:
            return False
        with self._moving:
            chunk = self._spool.peek(adopted)
        if chunk is None:
            return False
        exposures = [exposure for line in chunk.lines if (exposure := _parse(line)) is not None]
        self._record(exposures)
        unreadable = len(chunk.lines) - len(exposures)
        if unreadable:
            self.rejected += unreadable
            _log.error("%s: %d unreadable lines, each an exposure lost", chunk.segment.path, unreadable)
        with self._moving:
            self._spool.done(chunk)
        return True

    def _record(self, batch: Sequence[Exposure]) -> None:
        """Store a batch but for those that the database will never take, which would hold up all others for good."""
        try:
            self.store.record_exposures(batch)
        except StoreError as error:
            if not isinstance(error.__cause__, DataError | IntegrityError):
                raise
            if len(batch) > 1:
                self._record(batch[: len(batch) // 2])
                self._record(batch[len(batch) // 2 :])
                return
            self.rejected += 1
            _log.error("an exposure in %s is lost: %s", batch[0].experiment, error)

    def _spill(self) -> None:
        """Move what waits to disk. OSError, and the rest stays, if there is no more room or the disk fails."""
        assert self._spool is not None
        left = len(self._queue)
        while left > 0:
            with self._moving:
                batch = [self._queue.popleft() for _ in range(min(BATCH, left, len(self._queue)))]
                kept = 0
                try:
                    kept = self._spool.append([orjson.dumps(exposure) for exposure in batch])
                finally:
                    self._queue.extendleft(reversed(batch[kept:]))
            if kept < len(batch):
                raise OSError("the spool is full")
            left = left - kept if batch else 0

    def close(self) -> None:
        """Write what is left, to the database or else to disk, and stop the threads."""
        self._closing.set()
        if self._spool is not None and self._late():
            self._try_to_spill(quiet=False)  # before waiting for what hangs, which a deadline of others may cut short
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._threads = []
        try:
            self.flush()
        except StoreError as error:
            if self._spool is not None:
                self._try_to_spill(quiet=False)
            if self._queue:
                _log.error("%d exposures are lost: %s", len(self._queue), error)
        if self._spool is not None:
            with self._moving:
                self._spool.close()

    def _write_on(self) -> None:
        failing, pause, adopted_at = False, 0.0, -math.inf
        while not self._closing.wait(pause):
            try:
                self.flush()
                if self._spool is not None and time.monotonic() - adopted_at > ADOPTION_S:
                    adopted_at = time.monotonic()
                    with self._moving:
                        self._spool.adopt()
                pause = 0.0 if self._deliver(adopted=True) else self._interval_s
                failing = False
            except Exception as error:  # whatever it is, this thread must go on
                if not failing:  # one line per outage, not twenty per second
                    _log.error("exposures wait %s: %s", "in memory" if self._spool is None else "on disk", error)
                failing, pause = True, RETRY_S

    def _spill_on(self) -> None:
        failing = False
        while not self._closing.wait(FLUSH_INTERVAL_S):
            if self._late():
                failing = not self._try_to_spill(quiet=failing)

    def _late(self) -> bool:
        """True if what waits is for the disk: the database fails, or hangs."""
        return time.monotonic() - self._kept_up >= PATIENCE_S

    def _try_to_spill(self, quiet: bool) -> bool:
        try:
            self._spill()
        except OSError as error:
            if not quiet:
                _log.error("exposures wait in memory: %s", one_line(error))
            return False
        return True


def _parse(line: bytes) -> Exposure | None:
    try:
        return _EXPOSURE.validate_json(line)
    except ValidationError:
        return None
