"""Send rows of metrics from a worker to the driver through a Ray queue."""

import secrets
import time
from typing import Any

STARTS_AFTER = "starts_after"
"""Key of the row that a group of workers sends first: the iteration of the checkpoint that it goes on from, or None where
it begins anew."""
FAILURE = "failure"
"""Key of the row that holds the cause for which a group of workers has ended, in one line."""
PHASE = "phase"
"""Key of rows that name the part of the run that begins."""
PROBLEM = "problem"
"""Key of rows that hold the traceback of an error in a worker."""
TRANSCRIPTS = "transcripts"
"""Key of rows that hold episodes as text, and the folder of MLflow for these."""
SENDING_S = 0.5
"""Least time between two messages to the driver, in seconds."""


def metrics_queue(owner: str) -> Any:
    """Make a Ray queue for rows of metrics. The dashboard shows its actor as `OWNER metrics`."""
    from ray.util.queue import Queue

    # A name must be unique in Ray's namespace, and the queue of a run that has just failed may still exist.
    return Queue(
        actor_options={"num_cpus": 0, "name": f"{owner} metrics", "namespace": f"marl-ray-{secrets.token_hex(8)}"}
    )


class Rows:
    """Buffers rows and sends them at most twice a second, so that fast iterations do not wait."""

    def __init__(self, queue: Any):
        self.queue, self.sent = queue, float("-inf")
        self.rows: list[dict[str, Any]] = []

    def add(self, metrics: dict[str, Any]) -> None:
        self.rows.append(metrics)
        if time.monotonic() - self.sent > SENDING_S:
            self.flush()

    def send(self, row: dict[str, Any]) -> None:
        """Send a row at once."""
        self.rows.append(row)
        self.flush()

    def flush(self) -> None:
        if self.rows:
            self.queue.put_nowait_batch(self.rows)
            self.rows, self.sent = [], time.monotonic()
