"""One pool that all callers in a process share."""

import atexit
import os
import threading

from marl_ray.sandbox.client.pool import Pool

MAX_WORKERS = 16
"""Maximum number of workers, each of which is a process with a server."""
_lock = threading.Lock()
_pools: dict[int, Pool] = {}


def shared_pool() -> Pool:
    """Return this process's sandbox, started by the first call and closed when the process exits.

    Raises MarlRayError if none can be started.
    """
    with _lock:
        pid = os.getpid()
        if pid not in _pools:
            _pools.clear()  # these belong to another process, from which this one was forked
            _pools[pid] = Pool(min(MAX_WORKERS, len(os.sched_getaffinity(0))))
            atexit.register(_close, pid)
        return _pools[pid]


def _close(pid: int) -> None:
    if pid == os.getpid() and pid in _pools:
        _pools[pid].close()  # kept, so that no thread of the ending process starts another
