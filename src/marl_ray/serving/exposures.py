"""Exposure logging off the hot path: a bounded queue that a thread writes to the store in batches."""

import logging
import threading
from collections import deque

from marl_ray.experiments.store import ExperimentStore, Exposure, StoreError

FLUSH_INTERVAL_S = 0.05
CAPACITY = 100_000
"""Exposures that may wait for the database; beyond that they are dropped, counted, and logged by the next request."""
BATCH = 1_000
CLOSE_S = 20.0
"""How long closing waits for the thread's last batch."""

_log = logging.getLogger(__name__)


class ExposureLog:
    """Exposures on their way to the store. `put` never blocks; after `flush` everything put before is stored."""

    def __init__(self, store: ExperimentStore, capacity: int = CAPACITY, interval_s: float = FLUSH_INTERVAL_S):
        self.store = store
        self.dropped = 0
        self._capacity = capacity
        self._interval_s = interval_s
        self._queue: deque[Exposure] = deque()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the writing thread; twice is once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="exposure-log", daemon=True)
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Exposures in the queue."""
        return len(self._queue)

    def put(self, exposure: Exposure) -> bool:
        """Queue an exposure; False if the queue is full."""
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return False
        self._queue.append(exposure)
        return True

    def flush(self) -> None:
        """Write everything queued so far. Raises StoreError, and keeps what is not written, if the database fails."""
        # Whoever holds the lock has the batch that is not in the queue any more, so waiting for it is part of flushing.
        with self._writing:
            for _ in range(len(self._queue) // BATCH + 1):
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                try:
                    self.store.record_exposures(batch)
                except StoreError:
                    self._queue.extendleft(reversed(batch))
                    raise

    def close(self) -> None:
        """Write what is left and stop the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            self._thread = None
        try:
            self.flush()
        except StoreError as error:
            _log.error("%d exposures are lost: %s", len(self._queue), error)

    def _run(self) -> None:
        failing = False
        while not self._closing.wait(self._interval_s):
            if not self._queue:
                continue
            try:
                self.flush()
                failing = False
            except StoreError as error:
                if not failing:  # one line per outage, not twenty per second
                    _log.error("exposures wait in memory: %s", error)
                failing = True
